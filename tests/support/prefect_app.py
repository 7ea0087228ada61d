"""Prefect's server for tests that run side by side: on SQLite, what will write waits for its turn."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prefect.server.api import server
from prefect.server.database import dependencies
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.settings import get_current_settings
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

if TYPE_CHECKING:
    from fastapi import FastAPI


class ImmediateSqlite(AioSqliteConfiguration):
    """Begins every transaction as a writer.

    Prefect begins most as readers. Such a one is refused at once, whatever the time-out, if another has written before
    it does ("database is locked", SQLITE_BUSY_SNAPSHOT): requests are answered by 503, and several workers of tests
    meet that six times in a row; events are lost. Writers wait for one another, up to the time-out of 60 s.
    """

    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        async with super().begin_transaction(session, with_for_update=True) as transaction:
            yield transaction


def create_app() -> "FastAPI":
    """Give the application that uvicorn serves."""
    url = get_current_settings().server.database.connection_url
    assert url is not None
    dependencies.MODELS_DEPENDENCIES["database_config"] = ImmediateSqlite(connection_url=url.get_secret_value())
    return server.create_app()
