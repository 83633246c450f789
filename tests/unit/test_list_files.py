"""Copies of lists: a file that went bad does not take the list away."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from netacct.errors import ConfigError
from netacct.list_files import ListFiles
from netacct.policy_file import load

FIXTURES = Path(__file__).parents[1] / "fixtures/lists"
POLICY = "classes: {s3: {list: {format: aws, file: ip-ranges.json, services: [%s], regions: [eu-west-1]}}}\n"


class Place:
    """A policy with its list, and a state directory."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.file, self.state = folder / "p.yaml", folder / "ip-ranges.json", folder / "state"
        self.policy.write_text(POLICY % "S3")
        self.state.mkdir()
        self.mend()

    def mend(self) -> None:
        """Put a good list there."""
        shutil.copy(FIXTURES / "ip-ranges.json", self.file)

    def load(self) -> tuple[set[str], ListFiles]:
        """Load the policy as the agent does: its CIDRs, and what read them."""
        files = ListFiles(str(self.state))
        cidrs = {str(prefix.network) for prefix in load(str(self.policy), files).prefixes}
        files.keep()
        return cidrs, files

    def copies(self) -> list[Path]:
        """The copies that are kept."""
        return sorted(self.state.glob("lists/*"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A good policy with a good list."""
    return Place(tmp_path)


GOOD = {"198.51.100.0/25", "2001:db8:a:100::/56"}


def without_s3(file: Path) -> None:
    """A list that is whole, and has lost what the policy asks for."""
    file.write_text(file.read_text().replace('"S3"', '"S4"'))


BAD = [
    pytest.param(lambda file: file.write_bytes(file.read_bytes()[:900]), id="truncated"),
    pytest.param(lambda file: shutil.copy(FIXTURES / "cloud.json", file), id="foreign"),
    pytest.param(lambda file: file.write_text("<html>"), id="a page"),
    pytest.param(Path.unlink, id="gone"),
    pytest.param(without_s3, id="without the service"),
]


@pytest.mark.parametrize("spoil", BAD)
def test_the_last_good_list_holds(place: Place, spoil: Callable[[Path], object]) -> None:
    """A bad file gives the policy of its last good copy, is named as stale, and does not become the copy."""
    assert place.load()[0] == GOOD
    spoil(place.file)
    for _ in range(2):
        cidrs, files = place.load()
        assert cidrs == GOOD
        assert list(files.stale) == [str(place.file)]
    place.mend()
    cidrs, files = place.load()
    assert (cidrs, files.stale) == (GOOD, {})


@pytest.mark.parametrize("spoil", BAD)
def test_without_a_copy_it_is_an_error(place: Place, spoil: Callable[[Path], object]) -> None:
    """Where there never was a good list, a bad one is refused, and its path is known all the same."""
    spoil(place.file)
    files = ListFiles(str(place.state))
    with pytest.raises(ConfigError):
        load(str(place.policy), files)
    assert files.asked == {str(place.file)}
    assert place.copies() == []


def test_a_slip_in_the_policy_is_no_stale_list(place: Place) -> None:
    """A service that neither the file nor its copy has is the policy's error."""
    place.load()
    place.policy.write_text(POLICY % "S5")
    with pytest.raises(ConfigError, match="has no service 'S5'"):
        place.load()


def test_only_what_is_in_force_is_kept(place: Place) -> None:
    """A list is not copied before its whole policy is good."""
    place.policy.write_text(POLICY % "S3" + "default: 7\n")
    with pytest.raises(ConfigError):
        place.load()
    assert place.copies() == []


def test_an_unchanged_list_is_not_written_again(place: Place) -> None:
    """Loading the same list twice leaves the first copy alone; a changed one replaces it."""
    place.load()
    (copy,) = place.copies()
    inode = copy.stat().st_ino
    place.load()
    assert copy.stat().st_ino == inode
    place.file.write_text(place.file.read_text().replace("1700000000", "1700000001"))
    place.load()
    assert copy.stat().st_ino != inode
    assert place.copies() == [copy]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08", b"{}"])
def test_a_damaged_copy_is_none(place: Place, content: bytes) -> None:
    """A copy that cannot be read does not hide what is wrong with the file."""
    place.load()
    place.copies()[0].write_bytes(content)
    place.file.write_text("<html>")
    with pytest.raises(ConfigError, match="is not JSON"):
        place.load()


def test_a_copy_with_a_flipped_bit_is_none(place: Place) -> None:
    """Damage inside of a copy is noticed."""
    place.load()
    (copy,) = place.copies()
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 0x40
    copy.write_bytes(data)
    place.file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        place.load()


def test_no_room_for_copies_costs_only_them(place: Place) -> None:
    """Where no copy can be written the policy loads all the same."""
    (place.state / "lists").write_text("")
    assert place.load()[0] == GOOD


def test_a_copy_is_of_one_path(place: Place, tmp_path: Path) -> None:
    """Another file of the same name elsewhere does not get this one's copy."""
    place.load()
    (tmp_path / "else").mkdir()
    place.policy = place.policy.rename(tmp_path / "else/p.yaml")
    with pytest.raises(ConfigError, match="No such file"):
        place.load()


def test_without_a_state_directory_nothing_is_kept(place: Place) -> None:
    """Commands that only look, such as `netacct check`, see the files as they are."""
    place.load()
    place.file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        load(str(place.policy))
