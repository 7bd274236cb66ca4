"""From the service's settings to its provider.

The port knows nothing of our settings' file, and the settings nothing of the port: this is the one
place where their names meet.
"""

from services.kit.config import NrpSettings
from services.nrp_sync.provider import Provider, ProviderSettings, open_provider


def provider_settings(settings: NrpSettings) -> ProviderSettings:
    """What the port needs, from section `nrp` of the settings."""
    return ProviderSettings(
        provider=settings.provider,
        base_url=settings.endpoint,
        subscription_id=settings.subscription,
        resource_group=settings.resource_group,
        region=settings.location,
        service_gateway=settings.gateway,
        vnet=settings.virtual_network,
        vnet_resource_group=settings.vnet_resource_group,
        network_subscription_id=settings.network_subscription,
        api_version=settings.api_version,
        token=settings.token.reveal(),
        request_timeout=settings.request_timeout_s,
        operation_timeout=settings.operation_timeout_s,
        poll_interval=settings.poll_s,
        rate_limit=settings.rate_limit,
    )


async def connect(settings: NrpSettings) -> Provider:
    """The provider that the settings name. ValueError tells what is wrong with them."""
    return await open_provider(provider_settings(settings))
