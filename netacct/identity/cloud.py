"""Which cloud this node is in, by what the firmware says of the machine: no request is sent to find that out.

The fields are those of the DMI tables (DSP0134, SMBIOS), as the kernel shows them (Documentation/ABI/testing/
sysfs-class-dmi; the ones read here are for everybody). What the clouds write there:

    gce    sys_vendor "Google" or product_name "Google Compute Engine"
    aws    sys_vendor, bios_vendor or chassis_vendor "Amazon EC2"; on Xen a bios_version that ends in ".amazon"
    azure  chassis_asset_tag 7783-7084-3265-9085-8269-3286-77 ("MSFT AZURE VM" in decimal); the vendor alone is
           "Microsoft Corporation" on any Hyper-V
"""

from __future__ import annotations

from pathlib import Path

DMI = "/sys/class/dmi/id"

GCE, AWS, AZURE = "gce", "aws", "azure"

_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def which(directory: str = DMI) -> str | None:
    """GCE, AWS or AZURE; None anywhere else, and where nothing can be read."""

    def field(name: str) -> str:
        try:
            return (Path(directory) / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    if field("sys_vendor") == "Google" or field("product_name") == "Google Compute Engine":
        return GCE
    if "Amazon EC2" in map(field, ("sys_vendor", "bios_vendor", "chassis_vendor")):
        return AWS
    if field("bios_version").endswith(".amazon"):
        return AWS
    return AZURE if field("chassis_asset_tag") == _AZURE_TAG else None
