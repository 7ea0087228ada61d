"""The two UIs of a Prefect server, in a browser without a window, used as a person uses them."""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import FloatRect, Page, expect, sync_playwright

Ui = Literal["v1", "v2"]
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
_WIDTH, _HEIGHT, _MENU = 1440, 900, 256  # pixels; the menu of pages is on the left
_DRAWN_MS = 1500.0
_PATIENCE_MS = 180_000.0


class Screen:
    """One page of the browser.

    Args:
        page: of Playwright.
        address: of the server.
        pictures: folder for screenshots.
    """

    def __init__(self, page: Page, address: str, pictures: Path) -> None:
        self.page, self.address, self.pictures = page, address, pictures

    def open(self, path: str, ui: Ui = "v2") -> None:
        """Go to a page."""
        self.page.goto(f"{self.address}{'/v2' if ui == 'v2' else ''}{path}")

    def log_in(self, password: str, ui: Ui = "v2") -> None:
        """Type a password on the page that asks for it."""
        self.open("/login", ui)
        self.page.get_by_placeholder("admin:pass").fill(password)
        self.page.get_by_role("button", name="Login").click()

    def show(self, run: str, ui: Ui = "v2") -> None:
        """Go to the page of a flow run."""
        self.open(f"/runs/flow-run/{run}", ui)

    def retry(self, ui: Ui = "v2") -> None:
        """Press Retry on the page of a run that has ended, and again in the dialog that asks."""
        if ui == "v2":
            self._choose("Retry")
            dialog = self.page.get_by_role("alertdialog")
        else:
            self.page.get_by_role("button", name="Retry", exact=True).first.click()
            dialog = self.page.get_by_role("dialog").first
        dialog.get_by_role("button", name="Retry", exact=True).click()
        expect(dialog).to_be_hidden()

    def open_menu(self) -> None:
        """Open the menu of a run, behind the three dots."""
        self.page.get_by_role("button", name="Open menu").click()
        expect(self.page.get_by_role("menu")).to_be_visible()

    def cancel(self) -> None:
        """Choose Cancel on the page of a run under way, and say yes."""
        self._choose("Cancel")
        dialog = self.page.get_by_role("alertdialog")
        self.picture("cancel", 600)
        dialog.get_by_role("button", name="Cancel Flow Run").click()
        expect(dialog).to_be_hidden()

    def show_artifact(self, artifact: str) -> None:
        """Go to the page of an artifact."""
        self.open(f"/artifacts/artifact/{artifact}")

    def tab(self, name: str) -> None:
        """Open a tab below the run's graph."""
        self.page.get_by_role("tab", name=name).click()

    def search(self, words: str) -> None:
        """Have only those task runs listed that are named so."""
        self.page.get_by_placeholder("Search by run name").fill(words)

    def newest_first(self) -> None:
        """Have the log begin with its end."""
        self.page.get_by_role("combobox").filter(has_text="Oldest to newest").click()
        self.page.get_by_role("option", name="Newest to oldest").click()

    def sees(self, text: str) -> None:
        """Wait until `text` is on the page."""
        expect(self.page.get_by_text(text).first).to_be_visible()

    def misses(self, text: str) -> None:
        """Wait until `text` is not on the page."""
        expect(self.page.get_by_text(text)).to_have_count(0)

    def picture(self, name: str, height: int = _HEIGHT) -> None:
        """Take a picture of the page once it is drawn, without the menu, in few colours: it may go into a document."""
        self.page.wait_for_timeout(_DRAWN_MS)
        clip = FloatRect(x=_MENU, y=0, width=_WIDTH - _MENU, height=height)
        picture = Image.open(io.BytesIO(self.page.screenshot(animations="disabled", clip=clip)))
        picture.convert("RGB").quantize(128).save(self.pictures / f"{name}.png", optimize=True)

    def _choose(self, item: str) -> None:
        chosen = self.page.get_by_role("menuitem", name=item, exact=True)
        if not chosen.is_visible():
            self.open_menu()
        chosen.click()


@contextmanager
def browser(address: str, pictures: Path) -> Iterator[Screen]:
    """Start the system's Chromium."""
    program = shutil.which("chromium")
    assert program, "there is no chromium: apt-get install --no-install-recommends chromium"
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=_ARGUMENTS)
        page = chromium.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
        page.set_default_timeout(_PATIENCE_MS)
        page.route("**/*amplitude*", lambda route: route.abort())
        yield Screen(page, address, pictures)
        chromium.close()
