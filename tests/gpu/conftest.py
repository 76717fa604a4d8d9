from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption("--sweep", type=int, default=24, help="cases of the accuracy sweep (tests/gpu)")
