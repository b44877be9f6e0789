"""Project URLs of the package: those of the public host that builds it.

No public host is known to the sources. A workflow names its own by GITHUB_SERVER_URL and
GITHUB_REPOSITORY, anyone else by SLIPSTREAM_REPOSITORY=https://HOST/OWNER/NAME; a package that is
built without either has no URLs.
"""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def urls(environment: dict[str, str]) -> dict[str, str]:
    host, name = (environment.get(f"GITHUB_{x}") for x in ("SERVER_URL", "REPOSITORY"))
    home = environment.get("SLIPSTREAM_REPOSITORY") or (f"{host}/{name}" if host and name else "")
    if not home:
        return {}
    return {
        "Homepage": home,
        "Documentation": f"{home}/tree/main/docs",
        "Source": home,
        "Issues": f"{home}/issues",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
    }


class ProjectUrls(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        metadata["urls"] = urls(dict(os.environ))
