"""The form of a deployment: the settings that change often are in view, all others behind a tab."""

from ui.site import Site

_MOST_FIELDS = 15


def test_the_form_shows_few_fields(site: Site) -> None:
    with site.browser() as screen:
        screen.open(f"/deployments/deployment/{site.deployment}/run")
        for words in ("Run Name", "fork_of", "fork_step", "take_over", "Epochs", "Strategy", "All options"):
            screen.sees(words)
        fields = screen.page.locator("form").locator("input, textarea, [role=combobox], .cm-editor")
        assert 0 < sum(field.is_visible() for field in fields.all()) <= _MOST_FIELDS
        screen.picture("form")
