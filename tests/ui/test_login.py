"""The UI of a server with a password shows nothing without it, and the deployment with it."""

from typing import get_args

import pytest
from ui.browser import Ui
from ui.site import Site

DEPLOYMENTS = "/deployments"


@pytest.mark.parametrize("ui", get_args(Ui))
def test_the_ui_shows_nothing_without_the_password(site: Site, ui: Ui) -> None:
    with site.strange_browser() as screen:
        screen.open(DEPLOYMENTS, ui)
        screen.sees("Login")
        screen.misses("tests")
        screen.log_in(site.login[:-1], ui)
        screen.sees("Authentication failed" if ui == "v1" else "Invalid")
        screen.open(DEPLOYMENTS, ui)
        screen.misses("tests")
        screen.log_in(site.login, ui)
        screen.sees("Dashboard")
        screen.open(DEPLOYMENTS, ui)
        screen.sees("tests")
