"""What an engine made of a bundle: installed, selected and hit are told apart, with the reason."""

from __future__ import annotations

from pathlib import Path

from relight.agent.cache import trees
from relight.agent.cache.outcome import Verdict, engine_seconds, judge, load_failure
from tests.support.cache import AOT, make_tree

LOADED = "INFO [decorators.py:319] [backbone] Directly load AOT compilation from path /x/rank_0_0/model\n"
FAILED = (
    "WARNING [decorators.py:333] Compiling model again due to a load failure from /x/rank_0_0/model, "
    "reason: 'function' object has no attribute 'finalize_loading'\n"
)
SAVED = "INFO [decorators.py:743] [backbone] saved AOT compiled function to /x/rank_0_0/model\n"
OTHER = AOT.rpartition("/")[0] + "/" + "f" * 64


def test_loaded_and_nothing_new_is_a_hit(tmp_path: Path) -> None:
    tree = trees.scan(make_tree(tmp_path), "vllm")
    seen = judge(LOADED, tree, tree, installed=True)
    assert (seen.verdict, seen.installed, seen.selected, seen.hit, seen.compiled) == (Verdict.HIT, True, True, True, 0)


def test_an_engine_that_looked_elsewhere_did_not_select_it_and_both_keys_are_named(tmp_path: Path) -> None:
    before = trees.scan(make_tree(tmp_path), "vllm")
    after = trees.scan(make_tree(tmp_path, {f"{OTHER}/rank_0_0/model": b"1"}), "vllm")
    seen = judge(SAVED, before, after, installed=True)
    assert (seen.verdict, seen.selected, seen.hit) == (Verdict.NOT_SELECTED, False, False)
    assert "ffffffffffff" in seen.reason
    assert "738a30ed9751" in seen.reason


def test_what_failed_to_load_was_selected_and_is_no_hit(tmp_path: Path) -> None:
    tree = trees.scan(make_tree(tmp_path), "vllm")
    seen = judge(FAILED + SAVED, tree, tree, installed=True)
    assert (seen.verdict, seen.selected, seen.hit) == (Verdict.NOT_LOADED, True, False)
    assert "rank_0_0/model: 'function' object has no attribute" in seen.reason
    assert load_failure(LOADED) is None


def test_what_is_compiled_beside_a_loaded_bundle_is_counted(tmp_path: Path) -> None:
    before = trees.scan(make_tree(tmp_path), "vllm")
    after = trees.scan(make_tree(tmp_path, {"inductor/aa/sampler.so": b"1"}), "vllm")
    seen = judge(LOADED, before, after, installed=True)
    assert (seen.verdict, seen.selected, seen.hit, seen.compiled) == (Verdict.PARTLY, True, False, 1)
    assert "aa/sampler.so" in seen.reason


def test_without_a_bundle_everything_is_the_engines_own(tmp_path: Path) -> None:
    after = trees.scan(make_tree(tmp_path), "vllm")
    seen = judge(SAVED, trees.NOTHING, after, installed=False)
    assert (seen.verdict, seen.installed, seen.compiled) == (Verdict.COMPILED, False, len(after.files))


def test_an_engine_of_unknown_words_is_judged_by_its_directories(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"triton/A/k.cubin": b"1"})
    tree = trees.scan(root, "sglang")
    assert judge("whatever", tree, tree, installed=True).hit
    after = trees.scan(make_tree(tmp_path, {"triton/B/k.cubin": b"1"}), "sglang")
    assert judge("whatever", tree, after, installed=True).verdict is Verdict.PARTLY


def test_the_engines_own_time_is_that_of_its_slowest_rank() -> None:
    line = "init engine (profile, create kv cache, warmup model) took {} s\n"
    assert engine_seconds(line.format("108.70") + line.format("5.22")) == 108.70
    assert engine_seconds("nothing of the kind") is None
