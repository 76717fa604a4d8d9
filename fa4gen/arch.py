"""Silicon: limits and unit throughputs per architecture, identities and rates per device. No torch, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

from fa4gen.errors import UsageError

__all__ = ["ARCHS", "DEVICES", "Arch", "Device", "get_arch", "get_device"]


@dataclass(frozen=True)
class Arch:
    """One compile target. Rates are per SM and clock; sizes are in bytes unless named otherwise.

    Sources: CUDA C++ Programming Guide, tables "Technical Specifications per Compute Capability" (limits) and
    "Throughput of Native Arithmetic Instructions" (MUFU, FMA, shared memory); NVIDIA H100 and Blackwell architecture
    papers (dense 16-bit MMA); FlashAttention-4, arXiv 2603.05451, section 2 (MMA, MUFU and smem on B200).
    """

    name: str
    capability: tuple[int, int]
    mma_flops: int
    mufu_ops: int
    fma_ops: int
    smem_bytes_per_clock: int
    smem_per_sm: int
    smem_per_cta: int
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    max_threads_per_cta: int = 1024
    max_cluster: int = 8
    tmem_columns: int = 0

    @property
    def major(self) -> int:
        """Compute capability, major part."""
        return self.capability[0]


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_90a", (9, 0), 4096, 16, 128, 128, 233472, 232448),
        Arch("sm_100a", (10, 0), 8192, 16, 128, 128, 233472, 232448, tmem_columns=512),
        Arch("sm_103a", (10, 3), 8192, 32, 128, 128, 233472, 232448, tmem_columns=512),
    )
}


def get_arch(name: str) -> Arch:
    """The :class:`Arch` called ``name``.

    Raises:
        UsageError: unknown name; the message lists the known ones.
    """
    try:
        return ARCHS[name]
    except KeyError:
        raise UsageError(f"unknown arch {name!r}; known: {', '.join(ARCHS)}") from None


@dataclass(frozen=True)
class Device:
    """Silicon identity: two devices with equal ``key`` share tuned rows. The product name is provenance only.

    ``l2_bytes``, ``hbm_bytes_per_s`` and ``clock_mhz`` (the maximum SM clock) feed bounds and tile order.
    """

    arch: Arch
    sm_count: int
    name: str
    l2_bytes: int
    hbm_bytes_per_s: float
    clock_mhz: float

    @property
    def key(self) -> str:
        """File name stem of its tuned table, for instance ``sm_90a-132sm-228kb``."""
        return f"{self.arch.name}-{self.sm_count}sm-{self.arch.smem_per_sm // 1024}kb"


# Vendor datasheets; the H200's HBM rate and clock were also measured (4.27 TB/s copy, 1980 MHz maximum).
DEVICES = {
    device.name: device
    for device in (
        Device(ARCHS["sm_90a"], 132, "NVIDIA H200", 60 << 20, 4.8e12, 1980.0),
        Device(ARCHS["sm_90a"], 132, "NVIDIA H100 80GB HBM3", 50 << 20, 3.35e12, 1980.0),
        Device(ARCHS["sm_100a"], 148, "NVIDIA B200", 126 << 20, 8.0e12, 1965.0),
        Device(ARCHS["sm_103a"], 148, "NVIDIA B300", 126 << 20, 8.0e12, 1920.0),
    )
}


def get_device(name: str) -> Device:
    """A known device by product name ("NVIDIA H200"), short name ("h200") or :attr:`Device.key`.

    Raises:
        UsageError: unknown name; the message lists the known ones.
    """
    wanted = name.lower()
    for device in DEVICES.values():
        if wanted in (device.name.lower(), device.key, device.name.lower().split()[1]):
            return device
    raise UsageError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
