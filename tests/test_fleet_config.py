"""The [fleet] section's files: from a file of their own, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.connection import fleet_at, signer
from coordinator.run_folder import resolved_toml
from edgetrain.config import load
from edgetrain.errors import ConfigError
from edgetrain.fleet_config import FleetConfig, fleet_table
from edgetrain.wire.signature import make_key

RUN = """
[model]
path = "m.onnx"
[data]
train = "train.npz"
[fleet]
wait_s = 7.0
simulate = [{ name = "pi" }]
"""
FLEET = """
[fleet]
broker = "mqtts://broker.lan:8883"
namespace = "lab"
ca_file = "ca.crt"
cert_file = "coordinator.crt"
key_file = "/keys/coordinator.key"
signing_key_file = "signing.key"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "runs").mkdir()
    (tmp_path / "keys").mkdir()
    run, fleet = tmp_path / "runs" / "run.toml", tmp_path / "keys" / "fleet.toml"
    run.write_text(RUN)
    fleet.write_text(FLEET)
    return run, fleet


def test_a_fleet_file_goes_over_the_run_file_and_options_over_both(files):
    run, fleet = files
    config = load(run, ["fleet.simulate=[]", "fleet.namespace=mine"], fleet).fleet
    assert config == FleetConfig(
        broker="mqtts://broker.lan:8883",
        namespace="mine",
        wait_s=7.0,
        ca_file=fleet.parent / "ca.crt",
        cert_file=fleet.parent / "coordinator.crt",
        key_file=Path("/keys/coordinator.key"),
        signing_key_file=fleet.parent / "signing.key",
    )


def test_the_resolved_run_repeats_it_without_the_fleet_file(files, tmp_path):
    run, fleet = files
    config = load(run, ["fleet.simulate=[]"], fleet)
    again = tmp_path / "again.toml"
    again.write_text(resolved_toml(config))
    assert load(again) == config


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("fleet.cert_file=a.crt", "cert_file and key_file go together"),
        ("fleet.key_file=a.key", "cert_file and key_file go together"),
        ("fleet.ca_file=ca.crt", "for a broker at mqtts://"),
        ("fleet=3", "must be a section"),
    ],
)
def test_files_that_do_not_fit_are_named(files, option, words):
    run, fleet = files
    if option == "fleet=3":
        run.write_text(RUN.partition("[fleet]")[0].replace("[model]", "fleet = 3\n[model]"))
        with pytest.raises(ConfigError, match=words):
            load(run, [], fleet)
        return
    with pytest.raises(ConfigError, match=words):
        load(run, [option])


def test_simulated_devices_have_no_certificates(files):
    run, fleet = files
    with pytest.raises(ConfigError, match="simulated devices have no certificates"):
        load(run, [], fleet)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one section"),
        ("fleet = 3", "one section"),
        (FLEET + "[model]\npath = 'm.onnx'\n", "nothing else"),
        ("[fleet", "not a TOML file"),
    ],
)
def test_a_fleet_file_holds_the_section_alone(files, text, words):
    _, fleet = files
    fleet.write_text(text)
    with pytest.raises(ConfigError, match=words):
        fleet_table(fleet)


def test_a_commands_options_make_a_section(files):
    _, fleet = files
    assert fleet_at(None, None, fleet, insecure=False).namespace == "lab"
    assert fleet_at("mqtts://other", "x", fleet, insecure=False).broker == "mqtts://other"
    assert fleet_at("mqtt://far", None, None, insecure=True).insecure
    with pytest.raises(ConfigError, match="for a broker at mqtts"):
        fleet_at("mqtt://far", None, fleet, insecure=True)


def test_a_signing_key_must_be_there_private_and_one(tmp_path):
    assert signer(FleetConfig()) is None
    path = tmp_path / "signing.key"
    config = FleetConfig(signing_key_file=path)
    with pytest.raises(ConfigError, match=r"signing\.key: cannot be read"):
        signer(config)
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match=r"signing_key_file .*not a signing key"):
        signer(config)
    path.write_bytes(make_key()[0])
    assert len(signer(config).fingerprint) == 16
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        signer(config)
