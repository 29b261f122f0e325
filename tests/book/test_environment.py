"""The set-up says what is wrong and trusts no half-made .venv; nothing is installed here."""

import importlib.util
import sys

import pytest

import environment


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project folder with the three lists, as the current folder."""
    monkeypatch.chdir(tmp_path)
    for path in environment.LISTS:
        path.write_text("one\n")
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """The commands the set-up would have run; making .venv leaves a stand-in for its python."""
    made = []

    def record(command, **_):
        made.append([str(word) for word in command])
        if "venv" in made[-1]:
            environment.PYTHON.parent.mkdir(parents=True)
            environment.PYTHON.touch()
        return environment.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environment.subprocess, "run", record)
    return made


def test_first_call_installs_and_second_does_nothing(project, calls, capsys):
    assert environment.main() == 0
    assert [call[2] for call in calls] == ["venv", "pip", "pip", "pip"]
    assert "constraints.txt" in calls[1]
    assert {"--no-deps", environment.MODEL} <= set(calls[2])
    assert {"--no-deps", "--no-build-isolation", "-e"} <= set(calls[3])
    assert "making .venv" in capsys.readouterr().out
    calls.clear()
    assert environment.main() == 0
    assert calls == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", environment.LISTS, ids=str)
def test_a_changed_list_brings_it_up_to_date(project, calls, path):
    environment.main()
    calls.clear()
    path.write_text("two\n")
    assert environment.main() == 0
    assert [call[2] for call in calls] == ["pip"] * 4  # the first asks whether pip is there
    assert len(list(environment.VENV.glob("stamp-*"))) == 1


def test_an_unfinished_one_is_removed(project, calls):
    environment.PYTHON.parent.mkdir(parents=True)
    environment.PYTHON.touch()
    (environment.VENV / "leftover").touch()
    assert environment.main() == 0
    assert not (environment.VENV / "leftover").exists()
    assert calls[0][2] == "venv"


def test_a_failed_install_leaves_no_stamp(project, calls, monkeypatch):
    def fail(*_):
        raise environment.subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(environment, "pip_install", fail)
    with pytest.raises(environment.subprocess.CalledProcessError):
        environment.main()
    assert list(environment.VENV.glob("stamp-*")) == []


def test_an_old_python_is_refused(project, calls, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert environment.main() == 1
    assert "expected Python 3.11 or newer" in capsys.readouterr().err
    assert calls == []


def test_a_missing_ensurepip_names_the_package(project, calls, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find(name)
    )
    assert environment.main() == 1
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"apt install python{version}-venv" in capsys.readouterr().err
    assert calls == []


def test_another_folder_is_told(tmp_path, calls, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert environment.main() == 1
    assert "top folder" in capsys.readouterr().err
