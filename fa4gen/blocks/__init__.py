"""CuTe DSL building blocks of the kernel templates. Each module can be imported, tested and linted alone."""
