"""Taking pinned packages from the npm registry, their hashes checked."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Package:
    """A tarball.

    Attributes:
        requirement: ``name@version``.
        sha256: of the tarball.
    """

    requirement: str
    sha256: str

    def read(self, folder: Path) -> bytes:
        """The tarball's bytes, downloaded unless it is in the folder.

        Ends the program with an explanation where npm or a registry is missing.
        """
        path = folder / f"{self.requirement.replace('@', '-')}.tgz"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._download(folder)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            sys.exit(f"{path} is not the file it should be: delete it and run this again")
        return data

    def _download(self, folder: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            sys.exit(
                f"npm is not installed, and {self.requirement} comes from its registry"
            )
        command = [npm, "pack", "--silent", "--pack-destination", str(folder)]
        done = subprocess.run(  # noqa: S603 - nothing of it comes from outside
            [*command, self.requirement], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(
                f"npm cannot download {self.requirement}; is a registry reachable?"
                f" (npm config get registry)\n{done.stderr.strip()}"
            )
