"""Commands of Prefect's own that the pages show: its command line carries them out on a real server."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prefect import get_client
from prefect.cli import app
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.exceptions import ObjectNotFound
from prefect.states import Failed
from support.pages import PAGES, ROOT, blocks, command_lines

from midstride.engine.config.job import TrainingJob
from midstride.flows.deployment import deploy
from midstride.flows.server_setup import create_pool

Make = Callable[..., TrainingJob]

#: what starts a process that stays -> the tests that start it
ELSEWHERE = {"server start": "support/prefect_server.py", "worker start": "test_deployment.py"}


def shown() -> dict[str, list[str]]:
    """Return the words of every command by the first two, without those that are carried out elsewhere."""
    found = {" ".join(words[1:3]): words for page in PAGES for words in command_lines(page) if words[0] == "prefect"}
    return {command: words for command, words in found.items() if command not in ELSEWHERE}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    def run(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", words)
        code: object = 0
        try:
            app()
        except SystemExit as ended:
            code = ended.code
        assert not code, words

    return run


@pytest.fixture
def _clean(server: str) -> Iterator[None]:
    yield
    with get_client(sync_client=True) as client:
        with suppress(ObjectNotFound):
            client.delete_work_pool("containers")
        for one in client.read_automations_by_name("failed nights"):
            client.delete_automation(one.id)
        with suppress(ObjectNotFound):
            client.delete_global_concurrency_limit_by_name("gpus-of-pages")


@pytest.mark.usefixtures("_clean")
def test_prefect_carries_out_what_the_pages_show(
    make_job: Make, run: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = shown()
    create_pool("gpu")
    deploy(make_job(processes=1), "nightly", pool="gpu")
    [automation] = [text for _, text in blocks(ROOT / "docs/events.md", "yaml") if text.startswith("name: failed")]
    (tmp_path / "failed-nights.yaml").write_text(automation)

    with get_client(sync_client=True) as client:
        run(commands.pop("deployment run"))
        there = FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[client.read_deployment_by_name("train/nightly").id])
        )
        [flow_run] = client.read_flow_runs(flow_run_filter=there)
        client.set_flow_run_state(flow_run.id, Failed(), force=True)
        run([word.replace("ID", str(flow_run.id)) for word in commands.pop("flow-run retry")])
        assert client.read_flow_run(flow_run.id).state_name == "Scheduled"

        monkeypatch.chdir(ROOT)
        run(commands.pop("work-pool create"))
        assert client.read_work_pool("containers").type == "docker"

        monkeypatch.chdir(tmp_path)
        run(commands.pop("automation create"))
        [made] = client.read_automations_by_name("failed nights")
        assert made.enabled

        run([word.replace("gpus", "gpus-of-pages") for word in commands.pop("gcl create")])
        assert client.read_global_concurrency_limit_by_name("gpus-of-pages").limit == 8
    run(commands.pop("event emit"))
    assert not commands
