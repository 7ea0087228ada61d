"""Prefect's server for tests that run side by side: writers on SQLite wait for their turn, leases are short."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from prefect.server.api import server
from prefect.server.concurrency.lease_storage import ConcurrencyLimitLeaseMetadata, memory
from prefect.server.database import dependencies
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.services import perpetual_services
from prefect.server.utilities.leasing import ResourceLease
from prefect.settings import get_current_settings
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

if TYPE_CHECKING:
    from fastapi import FastAPI

#: services that a server has which is not started for one command alone
_SERVICES = {"monitor_cancelled_flow_runs", "monitor_expired_leases", "monitor_subflow_runs"}
_MINUTE, _MINUTE_HERE = timedelta(seconds=60), timedelta(seconds=15)


class ConcurrencyLeaseStorage(memory.ConcurrencyLeaseStorage):
    """Has leases of a minute, the shortest that the API allows, end after seconds."""

    async def create_lease(
        self, resource_ids: list[UUID], ttl: timedelta, metadata: ConcurrencyLimitLeaseMetadata | None = None
    ) -> ResourceLease[ConcurrencyLimitLeaseMetadata]:
        return await super().create_lease(resource_ids, _MINUTE_HERE if ttl == _MINUTE else ttl, metadata)

    async def renew_lease(self, lease_id: UUID, ttl: timedelta) -> bool:
        return await super().renew_lease(lease_id, _MINUTE_HERE if ttl == _MINUTE else ttl)


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
    for service in perpetual_services._PERPETUAL_SERVICES:
        service.run_in_ephemeral |= service.function.__name__ in _SERVICES
    return server.create_app()
