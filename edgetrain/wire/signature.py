"""Signed commands: a device that knows the coordinator's key obeys nobody else, and once.

The only door to Ed25519 of `cryptography`, which a device needs only if it has a key to
check with; it is imported where it is used, so that others need not have it.

A signature covers whom the command is for, the session that the device announced when it
started, and a counter that only grows. So a recording is of no use: not at another device,
not after a restart, not a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from edgetrain.errors import ConfigError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

_DOMAIN: Final = "edgetrain command 1"
_FINGERPRINT_CHARACTERS: Final = 16


class Signed(
    msgspec.Struct, frozen=True, tag="signed", array_like=True, forbid_unknown_fields=True
):
    """A command as bytes, its counter, and the signature over all that it covers."""

    command: bytes
    counter: int
    signature: bytes


_DECODER: Final = msgspec.msgpack.Decoder(Signed)


class Signer:
    """Signs the coordinator's commands.

    Args:
        key_pem: an Ed25519 private key, as `make_key` returns.
        clock_ns: wall-clock time: counters of later runs must be above those of earlier.

    Attributes:
        fingerprint: of the public key, as devices announce it.
    """

    def __init__(self, key_pem: bytes, clock_ns: Callable[[], int]) -> None:
        self._key = _private(key_pem)
        self._clock_ns = clock_ns
        self._counter = 0
        self.fingerprint = _fingerprint(self._key.public_key())

    def sign(self, command: bytes, to: str, session: str) -> bytes:
        """An encoded command as the device `to` takes it in this session, once."""
        self._counter = max(self._counter + 1, self._clock_ns())
        covered = _covered(command, to, session, self._counter)
        return msgspec.msgpack.encode(
            Signed(command, self._counter, self._key.sign(covered))
        )


class Verifier:
    """Lets through what the coordinator signed for this device and session, in order.

    Args:
        key_pem: the coordinator's public key.
        device, session: as announced.

    Attributes:
        fingerprint: of the key, to be announced.
    """

    def __init__(self, key_pem: bytes, device: str, session: str) -> None:
        self._key = _public(key_pem)
        self._device = device
        self._session = session
        self._last = 0
        self.fingerprint = _fingerprint(self._key)

    def open(self, data: bytes) -> bytes:
        """The command within.

        Raises:
            SignatureError: unsigned, signed by someone else, for another device or session,
                altered, or not newer than the last one.
        """
        from cryptography.exceptions import InvalidSignature

        try:
            signed = _DECODER.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise SignatureError("a command without a signature: refused") from error
        covered = _covered(signed.command, self._device, self._session, signed.counter)
        try:
            self._key.verify(signed.signature, covered)
        except InvalidSignature as error:
            raise SignatureError(
                "a command whose signature is not the coordinator's for this device and"
                " session: refused"
            ) from error
        if signed.counter <= self._last:
            raise SignatureError(
                "a command that is not newer than the last one: a recording, or the"
                " coordinator's clock was set back: refused"
            )
        self._last = signed.counter
        return signed.command


def make_key() -> tuple[bytes, bytes]:
    """A new private key and its public key, as PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    return private, key.public_key().public_bytes(pem, spki)


def _covered(command: bytes, to: str, session: str, counter: int) -> bytes:
    """What is signed. Msgpack states every length, so no two cases have the same bytes."""
    return msgspec.msgpack.encode((_DOMAIN, to, session, counter, command))


def _private(key_pem: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise _missing() from error
    try:
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"not a signing key in PEM: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError("not a signing key: it must be of Ed25519, from `fleet init`")
    return key


def _public(key_pem: bytes) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise _missing() from error
    try:
        key = serialization.load_pem_public_key(key_pem)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"not a public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError("not the coordinator's public key: it must be of Ed25519")
    return key


def _fingerprint(key: Ed25519PublicKey) -> str:
    digest = hashlib.sha256(key.public_bytes_raw()).hexdigest()
    return digest[:_FINGERPRINT_CHARACTERS]


def _missing() -> ConfigError:
    return ConfigError(
        "signatures need the package `cryptography`: pip install 'edgetrain[secure]'"
    )
