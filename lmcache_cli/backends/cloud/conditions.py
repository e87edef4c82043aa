"""Measuring which conditions a service keeps, because some accept and ignore them: five small requests in staging."""

from __future__ import annotations

from lmcache_cli.backends.cloud.body import Body
from lmcache_cli.backends.cloud.service import CloudService, Conditions
from lmcache_cli.backends.errors import AlreadyExists, Unavailable, Unsupported, VersionChanged
from lmcache_cli.backends.local.staging import new_staging_component
from lmcache_cli.backends.protocol import STAGING_PREFIX


async def measured_conditions(service: CloudService) -> Conditions:
    """Create an object twice and delete a version it does not have. Raises `Unavailable`."""
    name = f"{STAGING_PREFIX}/{new_staging_component()}"
    await service.put(name, Body([b"1"]), create=False)
    try:
        return Conditions(create=await _keeps_create(service, name), delete=await _keeps_delete(service, name))
    finally:
        try:
            await service.delete(name, None)
        except Unavailable:
            pass  # stays in staging until it is collected


async def _keeps_create(service: CloudService, name: str) -> bool:
    try:
        await service.put(name, Body([b"2"]), create=True)
    except AlreadyExists:
        return True
    except Unsupported:
        pass
    return False


async def _keeps_delete(service: CloudService, name: str) -> bool:
    try:
        await service.delete(name, service.no_version)
    except VersionChanged:
        return True
    except Unsupported:
        pass
    return False
