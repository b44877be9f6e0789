import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.training import corpus as corpus_module
from slipstream.training import tokenizer
from slipstream.training.config import Data
from slipstream.training.corpus import Corpus, File, find, split


@pytest.fixture
def tree(tmp_path):
    for i in range(40):
        file = tmp_path / f"d{i % 3}" / f"{i}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"document {i}\n" * (i + 1))
    (tmp_path / "d0" / "image.png").write_bytes(b"\0")
    return tmp_path


def data(*files, **options) -> Data:
    return Data(files=tuple(str(f) for f in files), **options)


def test_find_takes_directories_globs_and_files_once(tree) -> None:
    every = find([str(tree)], data(tree))
    assert len(every) == 40
    by_glob = find([f"{tree}/d0/*.txt", f"{tree}/d0"], data(tree))
    assert [f.path.parent.name for f in by_glob] == ["d0"] * 14
    assert find([f"{tree}/d0/0.txt"], data(tree))[0].name == "0.txt"
    assert len(find([str(tree)], data(tree, exclude=("d0/*",)))) == 26


@pytest.mark.parametrize("key", ["data.files", "data.eval_files"])
def test_split_names_the_pattern_that_finds_nothing(tree, key: str) -> None:
    both = (f"{tree}/d1", f"{tree}/nonesuch.txt")
    given = data(*both) if key == "data.files" else data(tree, eval_files=both)
    with pytest.raises(ValueError, match=rf"{key}: want text files, found none .*nonesuch\.txt$"):
        split(given)


def test_find_takes_names_with_brackets(tmp_path) -> None:
    folder = tmp_path / "text [v1]"
    folder.mkdir()
    (folder / "a[0].txt").write_text("text")
    for pattern in (folder, folder / "a[0].txt"):
        assert [f.path for f in find([str(pattern)], data(pattern))] == [folder / "a[0].txt"]


def test_find_refuses_compressed_files(tree) -> None:
    (tree / "d0/0.txt.gz").write_bytes(gzip.compress(b"text"))
    with pytest.raises(ValueError, match=r"data\.files: want text, got .*0\.txt\.gz, which"):
        find([f"{tree}/d0/*"], data(tree))
    assert len(find([str(tree)], data(tree))) == 40


def test_split_is_by_document_and_stable(tree, tmp_path_factory) -> None:
    train, held_out = split(data(tree, held_out=0.3))
    names = {f.name for f in train.files}, {f.name for f in held_out.files}
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 40
    assert 4 < len(names[1]) < 20
    assert {f.name for f in split(data(tree, held_out=0.3))[1].files} == names[1]


def test_split_takes_files_named_as_held_out(tree) -> None:
    train, held_out = split(data(tree, eval_files=(f"{tree}/d1",)))
    assert {f.path.parent.name for f in train.files} == {"d0", "d2"}
    assert {f.path.parent.name for f in held_out.files} == {"d1"}


def test_split_of_lines(tmp_path) -> None:
    lines = [json.dumps({"text": f"line {i}"}) for i in range(50)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    train, held_out = split(data(tmp_path, held_out=0.3))
    sides = [{p.text for f in s.files for p in s.pieces(f)} for s in (train, held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 50
    assert len(sides[1]) > 4


def test_split_knows_a_file_by_any_path(tree) -> None:
    (tree / "link").symlink_to(tree / "d1")
    for other in (f"{tree}/d0/../d1", f"{tree}/link"):
        train, held_out = split(data(tree, eval_files=(other,)))
        assert {f.path.parent.name for f in train.files} == {"d0", "d2"}
        assert len(find([f"{tree}/d1", other], data(tree))) == len(held_out.files) == 13


def test_split_reads_one_field_on_both_sides(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": name}))
    given = data(f"{tmp_path}/a.jsonl", eval_files=(f"{tmp_path}/b.jsonl",), text_field="body")
    assert [p.text for s in split(given) for f in s.files for p in s.pieces(f)] == ["a", "b"]


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl"])
@pytest.mark.parametrize("held", ["", "one.*"])
def test_split_rejects_a_side_without_documents(tmp_path, name: str, held: str) -> None:
    (tmp_path / name).write_text(json.dumps({"text": "text"}))
    with pytest.raises(ValueError, match=r"no (training|held-out) text.*data\.eval_files"):
        split(data(tmp_path, eval_files=(f"{tmp_path}/{held}",) if held else ()))


def test_pieces_join_to_the_file_and_continue_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(corpus_module, "PIECE", 64)
    text = "".join(f"some line, number {i}, ü\n" for i in range(40)) + "x" * 101 + "ü🦊" * 40
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    side, file = Corpus((File(path, "long.txt"),)), File(path, "long.txt")
    pieces = list(side.pieces(file))
    assert "".join(p.text for p in pieces) == text
    assert [p.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]
    for i, piece in enumerate(pieces):
        assert list(side.pieces(file, piece.offset)) == pieces[i:]


@pytest.mark.parametrize("line", ["x" * 40, "abc\n" * 10], ids=["one line", "lines"])
def test_pieces_of_every_size_of_a_file(line: str, tmp_path, monkeypatch) -> None:
    """Each is at most PIECE bytes, and the last one of a file that is not empty ends it."""
    monkeypatch.setattr(corpus_module, "PIECE", 8)
    path = tmp_path / "short.txt"
    side, file = Corpus((File(path, "short.txt"),)), File(path, "short.txt")
    for size in range(26):
        path.write_text(line[:size])
        pieces = list(side.pieces(file))
        assert "".join(p.text for p in pieces) == line[:size]
        assert len(pieces) == -(-size // 8)
        assert [p.ends for p in pieces] == [i == len(pieces) for i in range(1, len(pieces) + 1)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "JSONDecodeError"),
        ('{"txet": "x"}', "want a JSON object with text in 'text', data.text_field: KeyError"),
        ("[1]", "want a JSON object"),
        ('{"text": 3}', "TypeError: .*got 'int'"),
    ],
)
def test_corpus_names_wrong_line(tmp_path, line: str, words: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{{"text": "b"}}\n{line}\n')
    side, file = Corpus((File(path, "x.jsonl"),)), File(path, "x.jsonl")
    with pytest.raises(ValueError, match=rf"x\.jsonl, line 4: .*{words}"):
        list(side.pieces(file))
    with pytest.raises(ValueError, match=r"x\.jsonl, line 4: "):
        list(side.pieces(file, offset=15))


@pytest.mark.parametrize(
    ("files", "limit", "texts"),
    [
        (["ä", "é", "ö", "ü"], 8, ["ä", "é", "ö", "ü"]),
        (["ä", "é", "ö", "ü"], 4, ["ä", "ö"]),
        (["ä", "é", "ö", "ü"], 1, ["ä"]),
        (["äéöü", "öüäé"], 8, ["ä", "é", "ö", "ü"]),  # not the first file alone
        (["ä" * 6, "é"], 7, ["ä", "ä", "ä", "é"]),
        (["", "ä"], 2, ["ä"]),
        ([""], 2, []),
    ],
)
def test_sample_of_a_tokenizer_is_even_and_bounded(
    files: list[str], limit: int, texts: list[str]
) -> None:
    """By bytes, of which each of these characters has two, and is a document."""
    given = [SimpleNamespace(size=2 * len(x), text=x) for x in files]
    corpus: Any = SimpleNamespace(
        files=given, pieces=lambda file: (SimpleNamespace(text=x) for x in file.text)
    )
    assert sorted(tokenizer._sample(corpus, limit)) == sorted(texts)
