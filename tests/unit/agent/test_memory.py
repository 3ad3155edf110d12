"""The kernel's counter of kills for want of memory, as each kind of cgroup shows it."""

import pytest

from relight.agent.supervisor.memory import oom_kills


def tree(tmp_path, cgroups, **files):
    (tmp_path / "cgroup").write_text(cgroups)
    for name, text in files.items():
        path = tmp_path / "fs" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return oom_kills(tmp_path / "cgroup", tmp_path / "fs")


EVENTS, CONTROL = "low 0\noom 3\noom_kill 2\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("0::/pods/a\n", {"pods__a__memory_DOT_events": EVENTS}, 2),
        ("0::/\n", {"memory_DOT_events": EVENTS}, 2),
        # A container: the path is the host's, the mount begins at its own cgroup.
        ("0::/kubepods/x\n", {"memory_DOT_events": EVENTS}, 2),
        ("5:memory:/m\n0::/\n", {"memory__m__memory_DOT_oom_control": CONTROL}, 5),
        ("5:cpu,memory:/m\n", {"memory__memory_DOT_oom_control": CONTROL}, 5),
        ("5:cpu:/m\n", {}, None),
        ("0::/\n", {"memory_DOT_events": "oom_kill many\n"}, None),
        ("", {}, None),
    ],
)
def test_the_counter_is_found_in_either_kind_of_cgroup(tmp_path, cgroups, files, expected):
    assert tree(tmp_path, cgroups, **files) == expected
