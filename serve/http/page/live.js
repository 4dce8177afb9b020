// The live view reads /live while it is shown, and draws the snapshots.

import { call, events } from "./api.js";
import { barsIn, drawPages, drawRate, drawSteps, palette } from "./draw.js";
import { el } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const PERIOD_MS = 250;
const MINUTE = 240; // snapshots
const MAX_BARS = 400;

export class LiveView {
  constructor() {
    this.isShown = false;
    this.path = "/live";
    this.stopping = null;
    this.colours = palette();
    this.steps = []; // drawn ones
    this.coming = []; // of the last snapshot, on their way in
    this.rates = [];
    this.snapshot = null;
    this.chat = { ttft: [], tpot: [], tokens: 0 };
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)");
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.colours = palette();
      this.drawAll();
    });
    document.addEventListener("visibilitychange", () => this.restart());
    addEventListener("resize", () => this.drawAll());
  }

  setShown(isShown) {
    this.isShown = isShown;
    this.restart();
    this.drawAll();
  }

  /** Shows one of several models. */
  setModel(name) {
    const path = `/live?model=${encodeURIComponent(name)}`;
    if (path === this.path) return;
    this.path = path;
    this.restart();
  }

  /** Stops reading, and starts again with the current key if the view is visible. */
  restart() {
    this.stopping?.abort();
    this.stopping = null;
    if (this.isShown && !document.hidden) {
      this.stopping = new AbortController();
      this.read(this.stopping.signal);
    }
  }

  async read(signal) {
    let wait = 500;
    while (!signal.aborted) {
      try {
        const response = await call(this.path, { signal });
        for await (const snapshot of events(response)) {
          if (signal.aborted) return;
          wait = 500;
          this.take(snapshot);
        }
        this.say("lost, trying again");
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) {
          this.say("needs a key");
          return;
        }
        const states = { model_not_ready: "loading", model_asleep: "asleep" };
        this.say(states[error.code] ?? "lost, trying again");
        wait = error.retryAfter ? 1000 * error.retryAfter : wait;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, 8000);
    }
  }

  say(text) {
    if ($("live-state").textContent === text) return;
    $("live-state").textContent = text;
    $("live-state").classList.toggle("on", text === "live");
  }

  take(snapshot) {
    this.snapshot = snapshot;
    this.say("live");
    this.flush();
    this.coming = snapshot.steps;
    this.came = performance.now();
    this.rates.push(snapshot.per_s.generated);
    this.rates.splice(0, this.rates.length - MINUTE);
    this.showNumbers();
    this.drawStill();
    if (this.isCalm.matches) this.flush();
    this.animate();
  }

  /** Shows the steps that are still moving in at once. */
  flush() {
    this.steps.push(...this.coming);
    this.steps.splice(0, this.steps.length - MAX_BARS);
    this.coming = [];
  }

  /** Moves the new steps in until the next snapshot is due. */
  animate() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      const done = Math.min(1, (performance.now() - this.came) / PERIOD_MS);
      const all = this.coming.length;
      const shift = all ? (1 - done) * all : 0;
      const bars = barsIn($("steps"));
      drawSteps($("steps"), [...this.steps, ...this.coming].slice(-bars - all), this.colours, shift);
      if (done < 1 && all) this.animate();
    });
  }

  drawStill() {
    if (!this.snapshot) return;
    const { pages, sequences } = this.snapshot;
    const drawn = drawPages($("pages"), this.snapshot, this.colours);
    const used = `${format(pages.in_use)} of ${format(pages.total)} pages in use by ${count(sequences.length, "sequence")}`;
    const part = drawn < pages.total ? ` (${format(drawn)} drawn)` : "";
    const size = `A page: ${pages.tokens} tokens, ${format(Math.round(pages.bytes / 1024))} KiB`;
    this.note("pages", `${used}, ${format(pages.cached)} cached${part}. ${size}.`);
    drawRate($("rate"), this.rates, MINUTE, this.colours);
  }

  drawAll() {
    this.came = 0;
    this.drawStill();
    this.animate();
  }

  note(name, text) {
    $(`${name}-note`).textContent = text;
    $(name).setAttribute("aria-label", text);
  }

  showNumbers() {
    const { running, waiting, per_s, num_steps, steps, busy, prefix } = this.snapshot;
    $("n-running").textContent = format(running);
    $("n-waiting").textContent = format(waiting);
    $("n-rate").textContent = format(Math.round(per_s.generated));
    $("n-steps").textContent = format(Math.round((1000 / PERIOD_MS) * num_steps));
    if (steps.length) {
      const both = steps.filter(([, decode, prefill]) => decode && prefill).length;
      const mean = steps.reduce((sum, [ms]) => sum + ms, 0) / steps.length;
      const mixed = both ? `, ${both} with both kinds` : "";
      this.note("steps", `${count(num_steps, "step")} of ${mean.toFixed(1)} ms in the last quarter second${mixed}.`);
    } else if (this.steps.length) this.note("steps", "Idle: these were the last steps.");
    const hits = prefix[1] ? `; ${Math.round((100 * prefix[0]) / prefix[1])} % of prompt tokens came from the cache` : "";
    this.note("rate", `${format(Math.round(per_s.prefill))} prompt tokens/s now${hits}.`);
    this.showPools(busy);
  }

  showPools(busy) {
    for (const [name, share] of Object.entries(busy)) {
      let meter = document.getElementById(`pool-${name}`);
      if (!meter) {
        meter = el("meter", { id: `pool-${name}`, min: 0, max: 1, "aria-label": `${name} pool, busy` });
        $("pools").append(el("span", {}, name), meter);
      }
      meter.value = share;
    }
  }

  /** Shows the figures of an ended answer. ttft, tpot: milliseconds, null if there is none. */
  showChat({ ttft, tpot, tokens, cached }) {
    const { chat } = this;
    if (ttft !== null) chat.ttft.push(ttft);
    if (tpot !== null) chat.tpot.push(tpot);
    chat.tokens += tokens ?? 0;
    $("c-ttft").textContent = milliseconds(median(chat.ttft));
    $("c-tpot").textContent = milliseconds(median(chat.tpot));
    $("c-tokens").textContent = format(chat.tokens);
    if (cached !== null) $("c-cached").textContent = format(cached);
  }
}

const format = (number) => number.toLocaleString("en");
const count = (number, noun) => `${format(number)} ${noun}${number === 1 ? "" : "s"}`;
const milliseconds = (value) => (value === null ? "–" : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`);

function median(values) {
  if (!values.length) return null;
  return [...values].sort((a, b) => a - b)[Math.floor((values.length - 1) / 2)];
}
