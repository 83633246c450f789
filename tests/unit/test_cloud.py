"""Which cloud this is, by what the firmware says."""

from __future__ import annotations

from pathlib import Path

import pytest

from netacct.identity import cloud

TAG = "7783-7084-3265-9085-8269-3286-77"


@pytest.mark.parametrize(
    ("fields", "which"),
    [
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gce"),
        ({"product_name": "Google Compute Engine"}, "gce"),
        ({"sys_vendor": "Amazon EC2", "product_name": "m5.large", "bios_vendor": "Amazon EC2"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine", "chassis_asset_tag": TAG}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11"}, None),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC (Q35 + ICH9, 2009)"}, None),
        ({"sys_vendor": "Google Fan Club"}, None),
        ({}, None),
    ],
)
def test_each_cloud(tmp_path: Path, fields: dict[str, str], which: str | None) -> None:
    """Each cloud is told by its own words, and neither plain Hyper-V, Xen and KVM nor a machine without any are one."""
    for name, text in fields.items():
        (tmp_path / name).write_text(text + "\n")
    assert cloud.which(str(tmp_path)) == which


def test_a_machine_without_dmi(tmp_path: Path) -> None:
    """Where the kernel shows no DMI, as on many ARM boards, the machine is in no cloud."""
    assert cloud.which(str(tmp_path / "missing")) is None
