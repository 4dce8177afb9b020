"""The page in headless Chromium: chat, errors, the key, the live view and hostile answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
import uvloop

from tests.support.http.browser import CHROMIUM, browser
from tests.support.http.page_rig import Scripted, answers, ask, open_page

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]

KEY = "page-0123456789abcdef"
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script>\n\n"
    "[click](javascript:alert(1)) ![x](https://example.org/x.png) <svg/onload=alert(1)>\n\n"
    "# Head <b>line</b>\n\n- one **bold** <i>item</i>\n- two `<u>code</u>`\n\n"
    "```html\n<img src=y onerror=alert(2)>\n```\n\nThe end, *really*."
)
MARKUP = (
    *("<img src=x onerror=", "</script>", "[click](javascript:alert(1))", "<svg/onload=alert(1)>"),
    *("![x](https://example.org/x.png)", "Head <b>line</b>", "<u>code</u>"),
    "<img src=y onerror=alert(2)>",
)
READY = "document.querySelector('#model').textContent === 'm'"
DONE = "document.querySelector('.turn.assistant .figures')"
Chromium = tuple[asyncio.Runner, str]
LIVE = "document.querySelector('#live-state').textContent === 'live'"


@pytest.fixture(scope="module")
def chromium() -> Iterator[tuple[asyncio.Runner, str]]:
    """One browser for all tests, and the event loop in which it runs."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        running = browser()
        address = runner.run(running.__aenter__())
        yield runner, address
        runner.run(running.__aexit__(None, None, None))


def test_a_chat_from_the_keyboard(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        async with open_page(address, Scripted("Hello there, friend. ", step_s=0.01)) as (
            server,
            tab,
        ):
            await tab.until(READY)
            assert await tab.value("document.activeElement.id") == "prompt"
            await tab.type("one")
            await tab.press("Enter", shift=True)
            await tab.type("two")
            assert await tab.value("document.querySelector('#prompt').value") == "one\ntwo"
            await tab.press("Enter")
            await tab.until("document.querySelector('.turn.assistant .body').innerText.length > 3")
            assert not await tab.value(f"Boolean({DONE})"), "the answer is shown while it streams"
            await tab.until(DONE)
            assert (await tab.text(".turn.user .body")) == "one\ntwo"
            assert (await answers(tab)) == ["Hello there, friend."]
            figures = await tab.text(".figures")
            assert "tokens · first after" in figures and "ms each" in figures
            assert "Answer finished" in await tab.value(
                "document.querySelector('#status').textContent"
            )
            assert await tab.value("document.querySelector('#prompt').value") == ""
            await tab.press("Tab")
            await tab.press("Tab")
            style = "getComputedStyle(document.activeElement).outlineStyle"
            assert await tab.value(style) == "solid", "the focus is visible"
            assert tab.problems == []
            assert {url.partition("/page")[0].rstrip("/") for url in tab.requests} <= {
                server.url + path for path in ("", "/live", "/v1/models", "/v1/chat/completions")
            }

    run(check())


def test_stop_regenerate_and_edit(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        scripted = Scripted("word ", step_s=0.01, repeat=300)
        async with open_page(address, scripted) as (_, tab):
            await tab.until(READY)
            await ask(tab, "first")
            await tab.until("document.querySelector('.turn.assistant .body').innerText.length > 9")
            await tab.press("Escape")
            await tab.until(DONE)
            assert (await tab.text(".figures")).startswith("stopped")
            while scripted.engine.stats().num_unfinished:
                await asyncio.sleep(0.01)
            short = (await answers(tab))[0]
            await tab.click(".turn.assistant .actions button")  # Regenerate
            await tab.until("document.querySelector('#stop').hidden === false")
            await tab.until(
                f"document.querySelector('.turn.assistant .body').innerText.length > {len(short)}"
            )
            await tab.click("#stop")
            await tab.until(DONE)
            assert len(await answers(tab)) == 1
            await tab.click(".turn.user .actions button")  # Edit
            assert await tab.value("document.activeElement.value") == "first"
            await tab.type(" again")
            await tab.press("Enter")
            await tab.until("document.querySelector('#stop').hidden === false")
            assert await tab.text(".turn.user .body") == "first again"
            assert await tab.value("document.querySelectorAll('.turn').length") == 2
            await tab.click("#new-chat")
            await tab.until("!document.querySelector('.turn')")
            assert await tab.value("document.querySelector('#welcome').hidden") is False
            assert tab.problems == []

    run(check())


def test_a_hostile_answer_stays_text(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        async with open_page(address, Scripted(HOSTILE)) as (server, tab):
            await tab.until(READY)
            await ask(tab, "<img src=z onerror=alert(3)>")
            await tab.until(DONE)
            shown = (await answers(tab))[0]
            for part in MARKUP:
                assert part in shown, part
            assert await tab.text(".turn.user .body") == "<img src=z onerror=alert(3)>"
            assert "**" not in shown and "```" not in shown
            made = await tab.value(
                "[...document.querySelectorAll('.turn *')].map(e => e.localName).sort()"
            )
            assert set(made) <= {
                *("div", "p", "button", "span", "h3", "ul", "li", "strong", "code", "pre", "em")
            }
            assert {"h3", "li", "strong", "pre", "em"} <= set(made)
            assert await tab.value("document.title") == "m · mergestep"
            # the Content Security Policy would stop it even if it were markup
            await tab.value(
                "document.body.append(Object.assign(document.createElement('img'),"
                " {src: 'https://example.org/x.png'}))"
            )
            await tab.until("document.body.lastChild.complete")
            assert any("Content Security Policy" in problem for problem in tab.problems)
            tab.problems.clear()
            inline = await tab.value(
                "new Promise(r => { const s = document.createElement('div');"
                " try { s.innerHTML = '<b>x</b>'; r('made'); } catch (e) { r(e.name); } })"
            )
            assert inline == "TypeError"
            assert all(url.startswith(server.url) for url in tab.requests if "example" not in url)

    run(check())


def test_a_key_is_asked_for_and_kept_in_the_tab(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        async with open_page(address, Scripted("Yes."), api_keys=(f"a:{KEY}",)) as (_, tab):
            await tab.until("document.querySelector('#key-dialog').open")
            assert await tab.value("document.activeElement.id") == "key"
            await tab.type("wrong-key-0123456789")
            await tab.press("Enter")
            await tab.until("!document.querySelector('#key-wrong').hidden")
            await tab.until("document.querySelector('#key-dialog').open")
            await tab.type(KEY)
            await tab.press("Enter")
            await tab.until(READY)
            await tab.until(LIVE)
            await ask(tab, "may I?")
            await tab.until(DONE)
            assert await answers(tab) == ["Yes."]
            stored = await tab.value(
                "[sessionStorage.length, localStorage.length, document.cookie]"
            )
            assert stored == [1, 0, ""]
            assert KEY not in " ".join(tab.requests)

    run(check())


def test_errors_are_shown_and_can_be_retried(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        scripted = Scripted("Fine.", step_s=0.01)
        async with open_page(address, scripted) as (server, tab):
            await tab.until(READY)
            await tab.click("#settings-toggle")
            await tab.value("document.querySelector('#field-temperature').value = '9'")
            await ask(tab, "hot")
            await tab.until("document.querySelector('.notice')")
            assert "Error 400" in await tab.text(".notice")
            assert "temperature" in await tab.text(".notice")
            assert await tab.value("document.querySelector('.notice').getAttribute('role')") == (
                "alert"
            )
            await tab.value("document.querySelector('#field-temperature').value = ''")
            await tab.click(".notice button")
            await tab.until(DONE)
            assert await answers(tab) == ["Fine."]
            server.app.state = type(server.app.state).LOADING
            await ask(tab, "again")
            await tab.until("document.querySelector('.notice')")
            assert "Not ready." in await tab.text(".notice")
            assert "Try again in" in await tab.text(".notice button")
            assert await tab.value("document.querySelector('.notice button').disabled")
            server.app.state = type(server.app.state).READY
            await tab.until("!document.querySelector('.notice button').disabled")
            await tab.click(".notice button")
            await tab.until("document.querySelectorAll('.figures').length === 2")

    run(check())


def test_settings_are_sent(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        scripted = Scripted("word ", repeat=50)
        async with open_page(address, scripted) as (_, tab):
            await tab.until(READY)
            await tab.click("#settings-toggle")
            await tab.click("#field-max_tokens")
            await tab.type("3")
            await ask(tab, "short")
            await tab.until(DONE)
            figures = await tab.text(".figures")
            assert figures.startswith("cut off at the length limit · 3 tokens")

    run(check())


PICTURE = "document.querySelector('%s').toDataURL()"


def test_the_live_view_is_updated(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        async with open_page(address, Scripted("word ", step_s=0.01, repeat=200)) as (_, tab):
            await tab.until(LIVE)
            before = {name: await tab.value(PICTURE % name) for name in ("#steps", "#pages")}
            await ask(tab, "go on")
            await tab.until("document.querySelector('#n-running').textContent === '1'")
            await tab.until("Number(document.querySelector('#n-rate').textContent) > 20")
            for name, pixels in before.items():
                await tab.until(f"{PICTURE % name} !== '{pixels}'")
            moving = await tab.value(PICTURE % "#steps")
            await tab.until(f"{PICTURE % '#steps'} !== '{moving}'")
            assert "step" in await tab.text("#steps-note")
            assert "pages in use by 1 sequence," in await tab.text("#pages-note")
            assert await tab.value("document.querySelector('#pool-compute').value") > 0.3
            await tab.press("Escape")
            await tab.until("document.querySelector('#n-running').textContent === '0'")
            assert (await tab.text("#c-ttft")).endswith("ms")
            assert tab.problems == []

    run(check())


# Answers the next chat with all its events in one piece.
AT_ONCE = """(() => {
  const text = ["Hello ", "there."].map((part) => ({choices: [{delta: {content: part}}]}));
  const end = {choices: [{delta: {}, finish_reason: "stop"}]};
  const usage = {choices: [], usage: {completion_tokens: 2,
    prompt_tokens_details: {cached_tokens: 64}}};
  const body = [...text, end, usage].map((event) => `data: ${JSON.stringify(event)}\\n\\n`);
  window.fetch = async () => new Response(body.join("") + "data: [DONE]\\n\\n");
})()"""


def test_figures_of_tokens_that_came_together(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        async with open_page(address, Scripted("x")) as (_, tab):
            await tab.until(READY)
            await tab.value(AT_ONCE)
            await ask(tab, "hello")
            await tab.until(DONE)
            assert re.fullmatch(r"2 tokens · all after \d+ ms", await tab.text(".figures"))
            assert await tab.text("#c-tpot") == "–"
            cached = "document.querySelector('#c-cached').parentElement.innerText"
            assert (await tab.value(cached)).split() == ["cached", "tokens", "64"]

    run(check())


def test_a_phone_shows_the_whole_name_of_the_model(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        name = "an-organization/A-Model-With-A-Long-Name-7B-Instruct-2507-int8"
        async with open_page(address, Scripted("x", name=name)) as (_, tab):
            await tab.size(375, 700, phone=True)
            await tab.until(f"document.querySelector('#model').textContent === '{name}'")
            for part in ("Width", "Height"):
                hidden = f"(e => e.scroll{part} - e.client{part})(document.querySelector('#model'))"
                assert await tab.value(hidden) <= 0
            top = "document.querySelector('%s').getBoundingClientRect().top"
            bottom = "document.querySelector('.top').getBoundingClientRect().bottom"
            await tab.click("#engine-toggle")
            assert await tab.value(top % "#engine") >= await tab.value(bottom)

    run(check())


def test_the_page_fits_a_phone_screen(chromium: Chromium) -> None:
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        wide = "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n" + "word " * 30
        async with open_page(address, Scripted(wide)) as (server, tab):
            for dark in (False, True):
                await tab.size(375, 700, dark=dark, phone=True)
                await tab.goto(server.url + "/")
                await tab.until(READY)
                await ask(tab, "z" * 200)
                await tab.until(DONE)
                for panel in ("", "#settings-toggle", "#engine-toggle"):
                    if panel:
                        await tab.click(panel)
                    width = await tab.value(
                        "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth,"
                        " document.querySelector('#log').scrollWidth)"
                    )
                    assert width <= 375, (panel, width)
                ink = await tab.value("getComputedStyle(document.body).color")
                assert ("231" in ink) == dark
            assert tab.problems == []

    run(check())


def test_keyboard_order_and_names(chromium: Chromium) -> None:
    """Every control has a name, and Tab follows the visible order."""
    run, address = chromium[0].run, chromium[1]

    async def check() -> None:
        async with open_page(address, Scripted("x")) as (_, tab):
            await tab.until(READY)
            await tab.value("document.querySelector('.skip').focus()")
            reached = []
            for step in range(10):
                if step:
                    await tab.press("Tab")
                reached.append(
                    await tab.value(
                        "document.activeElement.id || document.activeElement.textContent"
                    )
                )
            assert reached[0] == "Skip to the message box"
            assert reached[1:4] == ["new-chat", "settings-toggle", "engine-toggle"]
            assert reached[-2:] == ["prompt", "send"], reached
            nameless = await tab.value(
                "[...document.querySelectorAll('button, input, textarea, canvas, meter')]"
                ".filter(e => !(e.textContent.trim() || e.labels?.length"
                " || e.getAttribute('aria-label'))).map(e => e.outerHTML)"
            )
            assert nameless == []

    run(check())
