import subprocess

import pytest

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.store import Store
from tests.states.conftest import make_record


def test_a_store_opens_with_the_record_it_was_made_with(store):
    assert Store.open(store.folder).record == store.record == Store.create(store.folder, make_record()).record
    assert "h_1, h_2, h_4, last" in repr(store)


def test_a_store_of_another_record_is_refused_with_the_fields_that_differ(store):
    with pytest.raises(CheckRefused, match=r"boundaries is \[1, 2, 4\], now \[2, 3, 5\]; dtype is") as refusal:
        Store.create(store.folder, make_record(boundaries=[2, 3, 5], dtype="float32"))
    assert "store.name" in refusal.value.remedy
    assert Store.open(store.folder).record == make_record()


def test_a_missing_data_root_is_named_and_not_made(tmp_path):
    with pytest.raises(CheckRefused, match=f"{tmp_path}/nowhere does not exist"):
        Store.create(tmp_path / "nowhere" / "tiny", make_record())
    assert not (tmp_path / "nowhere").exists()


def test_a_read_only_data_root_is_named(small_disk):
    root = small_disk("size=1m")
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    with pytest.raises(CheckRefused, match=f"{root}/tiny cannot be written: Read-only"):
        Store.create(root / "tiny", make_record())


def test_opening_refuses_a_folder_without_a_store(tmp_path):
    with pytest.raises(CheckRefused, match=r"holds no store\.json"):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda text: "", lambda text: text[:50], lambda text: text.replace('"tiny"', '"other"')]
)
def test_a_damaged_store_json_is_named_and_not_replaced(store, damage):
    path = store.folder / "store.json"
    path.write_text(damage(path.read_text()))
    before = path.read_bytes()
    for use in (Store.open, lambda folder: Store.create(folder, make_record())):
        with pytest.raises(CheckRefused, match=r"store\.json .* is damaged"):
            use(store.folder)
    assert path.read_bytes() == before


def test_a_lost_store_json_comes_back_only_under_the_record_of_the_files(filled):
    (filled.folder / "store.json").unlink()
    with pytest.raises(CheckRefused, match=r"lost its store\.json"):
        Store.create(filled.folder, make_record(boundaries=[2, 3, 5]))
    assert Store.create(filled.folder, make_record()).record == filled.record
