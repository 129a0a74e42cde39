"""Text files packed into blocks of tokens."""

from __future__ import annotations

import json
import random

import pytest
from checkpoints import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_drope import text
from hf_drope.text import PackedText, beginning, leading_tokens, read_documents, text_windows


def words(first: int, count: int) -> str:
    return " ".join(f"w{index}" for index in range(first, first + count))


def test_documents_are_packed_with_an_end_token_between(tmp_path):
    (tmp_path / "a.txt").write_text(words(10, 4))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": words(first, 2)}) for first in (30, 40)) + "\n\n")
    data = PackedText([tmp_path / "a.txt", tmp_path / "b.jsonl"], tiny_tokenizer(), 5)
    assert [row["input_ids"].tolist() for row in (data[0], data[1])] == [[10, 11, 12, 13, 2], [30, 31, 2, 40, 41]]
    assert len(data) == 2
    assert data[0]["labels"].equal(data[0]["input_ids"])


def test_lines_end_at_line_feeds_alone_and_a_byte_order_mark_is_no_text(tmp_path):
    # U+2028 and U+0085 may stand unescaped in JSON, and are line ends to Python's splitlines.
    document = "one\u2028two\u0085three"
    line = json.dumps({"text": document}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{line}\r\n{line}".encode())
    (tmp_path / "b.txt").write_bytes("\ufeffplain".encode())
    assert list(read_documents([tmp_path / "a.jsonl", tmp_path / "b.txt"])) == [document, document, "plain"]


def test_a_long_document_is_tokenised_in_pieces_to_the_same_tokens(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\n".join(words(3 + index % 90, 3) for index in range(40)))
    whole = PackedText([tmp_path / "a.txt"], tiny_tokenizer(), 4).blocks
    monkeypatch.setattr(text, "_PIECE", 32)
    assert PackedText([tmp_path / "a.txt"], tiny_tokenizer(), 4).blocks.equal(whole)


def test_a_tokenizer_without_end_token_joins_documents_directly(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(words(10, 2))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    data = PackedText([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, 4)
    assert data[0]["input_ids"].tolist() == [10, 11, 10, 11]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b" \n", r"a\.txt is empty"),
        ("a.txt", b"ab\xff\xfe", r"a\.txt is not UTF-8: byte 2"),
        ("a.txt", b"\xef\xbb\xbfab\xff", r"a\.txt is not UTF-8: byte 5"),
        ("a.jsonl", b'{"text": "x"}\n"\xff"\n', r"a\.jsonl is not UTF-8: byte 15"),
        ("a.jsonl", b'{"text": "x"}\n{text}\n', r"line 2, is not JSON"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1, has no field 'text' that holds a string"),
        ("a.jsonl", b"[1]\n", r"line 1, has no field 'text'"),
        ("a.jsonl", b'{"text": ""}\n\n', r"a\.jsonl is empty"),
        ("a.json", b"x", r"ends in '\.json'.*Did you mean '\.jsonl'"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1, has no field 'text'"),
        ("a.pdf", b"x", r"ends in '\.pdf'"),
        ("missing.txt", None, r"no text file"),
    ],
)
def test_unusable_files_are_named_in_a_sentence(name, content, sentence, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        list(read_documents([tmp_path / name]))


def test_too_little_text_for_one_block_says_how_much_there_was(tmp_path):
    (tmp_path / "a.txt").write_text(words(10, 4))
    with pytest.raises(ValueError, match="sequence_length is 1"):
        PackedText([tmp_path / "a.txt"], tiny_tokenizer(), 1)
    with pytest.raises(ValueError, match="has 5 tokens, too few for one sequence of 8"):
        PackedText([tmp_path / "a.txt"], tiny_tokenizer(), 8)


def numbers(count: int, first: int = 0) -> str:
    """Words of one length, so that places in the text are places among the tokens."""
    return " ".join(f"w{10 + (first + index) % 80}" for index in range(count))


def test_windows_are_taken_evenly_and_begin_at_words(tmp_path):
    (tmp_path / "a.txt").write_text(numbers(400))
    windows = text_windows([tmp_path / "a.txt"], tiny_tokenizer(), 12, 5)
    assert windows.shape == (5, 12)
    tokens = [10 + index % 80 for index in range(400)]
    for index, row in enumerate(windows.tolist()):
        start = 80 * index
        assert row in (tokens[start : start + 12], tokens[start + 1 : start + 13]), index
    assert text_windows([tmp_path / "a.txt"], tiny_tokenizer(), 12, 5).equal(windows)


def test_a_window_never_begins_inside_a_word(tmp_path):
    known = {f"w{index}" for index in range(3, 97)}
    generator = random.Random(0)
    text_file = tmp_path / "a.txt"
    text_file.write_text("  ".join(f"w{generator.randrange(20, 97)}" for _ in range(300)))

    class Words:
        """Refuses all but whole words."""

        def __call__(self, document, **arguments):
            words = document.split()
            assert set(words[:-1]) <= known
            assert words[0] in known
            return {"input_ids": [int(word[1:] or 0) for word in words]}

    assert text_windows([text_file], Words(), 9, 7).shape == (7, 9)


def test_windows_come_from_all_files_and_may_run_over_their_ends(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(["w10"] * 100))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": " ".join([f"w{x}"] * 50)}) for x in (20, 30)))
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    found = text_windows(files, tiny_tokenizer(), 20, 4)
    assert found[:2].unique().tolist() == [10]
    assert found[2:].unique().tolist() == [20, 30]
    # One window over all of it crosses both ends.
    assert text_windows(files, tiny_tokenizer(), 200, 1).unique(return_counts=True)[1].tolist() == [100, 50, 50]
    assert text_windows(files[::-1], tiny_tokenizer(), 20, 4)[0].unique().tolist() == [20]


def test_long_words_are_looked_at_as_far_as_it_takes(tmp_path):
    """A few characters a token are a guess; a token of fifty is found all the same."""
    (tmp_path / "a.txt").write_text(" ".join("x" * 50 for _ in range(60)))
    assert text_windows([tmp_path / "a.txt"], tiny_tokenizer(), 20, 2).tolist() == [[3] * 20] * 2


def test_too_little_text_for_the_windows_says_how_much_there_was(tmp_path):
    (tmp_path / "a.txt").write_text(numbers(50))
    with pytest.raises(
        ValueError, match=r"^The text has 50 tokens, too few for 4 windows of 20; give more text, or fewer tokens\.$"
    ):
        text_windows([tmp_path / "a.txt"], tiny_tokenizer(), 20, 4)
    with pytest.raises(ValueError, match=r"too few for 1 windows of 51; give"):
        text_windows([tmp_path / "a.txt"], tiny_tokenizer(), 51, 1)
    assert text_windows([tmp_path / "a.txt"], tiny_tokenizer(), 50, 1).shape == (1, 50)
    with pytest.raises(ValueError, match="no text file"):
        text_windows([tmp_path / "none.txt"], tiny_tokenizer(), 4, 1)


class Characters:
    def __call__(self, document, **arguments):
        return {"input_ids": [ord(character) % 90 + 3 for character in document]}


def test_text_without_spaces_has_windows_too(tmp_path):
    (tmp_path / "a.txt").write_text("汉字之间没有空格" * 100, encoding="utf-8")
    assert text_windows([tmp_path / "a.txt"], Characters(), 16, 4).shape == (4, 16)


def test_leading_tokens_are_those_of_the_first_documents_with_an_end_token_between(tmp_path):
    (tmp_path / "a.txt").write_text(words(10, 4))
    (tmp_path / "b.txt").write_text(words(30, 60))
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    everything = [10, 11, 12, 13, 2, *range(30, 90), 2]
    for count in (3, 5, 20, 66, 100):
        assert leading_tokens(files, tiny_tokenizer(), count).tolist() == everything[:count]
    # What is not needed is not read.
    assert leading_tokens([files[0], tmp_path / "none.txt"], tiny_tokenizer(), 4).tolist() == [10, 11, 12, 13]


def test_the_tokens_that_every_text_begins_with(tmp_path):
    tokenizer = tiny_tokenizer()
    assert beginning(tokenizer) == []
    template = {"special_tokens": [("<bos>", 1), ("<eos>", 2)]}
    for single, expected in (("<bos> $A", [1]), ("<bos> <eos> $A <eos>", [1, 2]), ("$A <eos>", [])):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, **template)
        assert beginning(tokenizer) == expected
