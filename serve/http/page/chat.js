// The conversation: sending, streaming, stopping, regenerating, editing.

import { CallError, call, events } from "./api.js";
import { Shown, copyText, el } from "./markdown.js";
import { sampling, systemMessages } from "./settings.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const prompt = $("prompt");
const MIN_APART_MS = 0.05; // tokens that come faster have come together

/**
 * Shows the conversation and sends its turns.
 * askKey: () -> promise of whether a key was given. findModel: () -> promise of the model's name.
 * forgetModel: called when the server does not have the model. onStats: called with the figures of
 * every answer.
 */
export class Chat {
  constructor({ askKey, findModel, forgetModel, onStats }) {
    this.askKey = askKey;
    this.forgetModel = forgetModel;
    this.findModel = findModel;
    this.onStats = onStats;
    this.turns = []; // {role, content, node}
    this.stopping = null;
    this.notice = null;
  }

  get isBusy() {
    return this.stopping !== null;
  }

  say(text) {
    $("status").textContent = text;
  }

  clear() {
    this.stop();
    this.cut(0);
    $("welcome").hidden = false;
    prompt.focus();
  }

  /** Removes the turns from an index on. */
  cut(place) {
    for (const turn of this.turns.splice(place)) (turn.form ?? turn.node).remove();
    this.dismiss();
  }

  dismiss() {
    this.notice?.remove();
    this.notice = null;
  }

  send(text) {
    if (this.isBusy || !text.trim()) return false;
    this.dismiss();
    this.add("user", text);
    this.answer();
    return true;
  }

  stop() {
    this.stopping?.abort();
  }

  add(role, content) {
    $("welcome").hidden = true;
    const turn = { role, content, thoughts: "", body: el("div", { class: "body" }) };
    turn.actions = el("div", { class: "actions" });
    turn.node = el(
      "article",
      { class: `turn ${role}`, "aria-label": role === "user" ? "You" : "Answer" },
      turn.body,
      turn.actions,
    );
    if (role === "user") {
      turn.body.textContent = content;
      this.addAction(turn, "Edit", () => this.edit(turn));
    } else {
      turn.shown = new Shown(turn.body);
    }
    this.addAction(turn, "Copy", (button) => copyText(turn.content, button));
    this.turns.push(turn);
    log.append(turn.node);
    this.follow(true);
    return turn;
  }

  addAction(turn, title, act) {
    const button = el("button", { type: "button", class: "quiet" }, title);
    button.addEventListener("click", () => act(button));
    turn.actions.append(button);
  }

  /** Scrolls to the end, unless the reader has scrolled away. */
  follow(always) {
    const rest = log.scrollHeight - log.scrollTop - log.clientHeight;
    if (always || rest < 120) log.scrollTop = log.scrollHeight;
  }

  /** Replaces a message by an editor; saving it sends the conversation again from there. */
  edit(turn) {
    if (this.isBusy) return;
    const field = el("textarea", { "aria-label": "Edit your message", rows: "3" });
    field.value = turn.content;
    const save = el("button", { type: "submit", class: "send" }, "Send again");
    const cancel = el("button", { type: "button", class: "quiet" }, "Cancel");
    const form = el("form", { class: "edit" }, field, el("div", { class: "row" }, save, cancel));
    const put = () => {
      form.replaceWith(turn.node);
      turn.form = null;
    };
    const close = () => {
      put();
      turn.actions.querySelector("button").focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (isSend(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy || !field.value.trim()) return;
      put();
      this.cut(this.turns.indexOf(turn));
      this.send(field.value);
      prompt.focus();
    });
    turn.node.replaceWith(form);
    turn.form = form;
    field.focus();
  }

  regenerate(turn) {
    if (this.isBusy) return;
    this.cut(this.turns.indexOf(turn));
    this.answer();
  }

  async answer() {
    const stopping = (this.stopping = new AbortController());
    this.showBusy(true);
    const turn = this.add("assistant", "");
    turn.node.classList.add("waiting");
    turn.node.setAttribute("aria-busy", "true");
    const timing = { sentAt: performance.now(), firstAt: 0, lastAt: 0, usage: null, reason: "" };
    let failure = null;
    try {
      await this.read(turn, timing, stopping.signal);
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
    }
    if (this.stopping === stopping) this.stopping = null;
    this.showBusy(this.isBusy);
    this.finish(turn, timing, failure, stopping.signal.aborted);
  }

  async read(turn, timing, signal) {
    const messages = this.turns.slice(0, this.turns.indexOf(turn));
    const body = {
      model: await this.findModel(),
      messages: [...systemMessages(), ...messages.map(({ role, content }) => ({ role, content }))],
      stream: true,
      stream_options: { include_usage: true },
      ...sampling(),
    };
    const response = await call("/v1/chat/completions", { body, signal });
    for await (const event of events(response)) {
      if (event.error) throw new CallError(500, event.error.message, { code: event.error.code });
      if (event.usage) timing.usage = event.usage;
      const choice = event.choices?.[0];
      if (choice?.finish_reason) timing.reason = choice.finish_reason;
      const text = choice?.delta?.content ?? "";
      const thought = choice?.delta?.reasoning_content ?? "";
      if (!text && !thought) continue;
      timing.lastAt = event.arrivedAt;
      timing.firstAt ||= timing.lastAt;
      turn.content += text;
      turn.thoughts += thought;
      turn.node.classList.remove("waiting");
      this.draw(turn);
    }
    if (!timing.reason) throw new CallError(0, "The answer broke off.");
  }

  /** Draws a turn at most once per frame, however many tokens came. */
  draw(turn) {
    turn.frame ||= requestAnimationFrame(() => {
      turn.frame = 0;
      show(turn);
      this.follow(false);
    });
  }

  finish(turn, timing, failure, wasStopped) {
    cancelAnimationFrame(turn.frame);
    turn.node.classList.remove("waiting");
    turn.node.removeAttribute("aria-busy");
    if (!this.turns.includes(turn)) return;
    show(turn);
    if (!turn.content && !turn.thoughts && (failure || wasStopped)) {
      this.cut(this.turns.indexOf(turn));
    } else {
      const again = el("button", { type: "button", class: "quiet" }, "Regenerate");
      again.addEventListener("click", () => this.regenerate(turn));
      turn.actions.prepend(again);
      const figures = this.figures(timing, wasStopped);
      turn.actions.append(el("span", { class: "figures" }, figures));
      this.say(`${wasStopped ? "Stopped" : "Answer finished"}. ${figures}`);
    }
    if (failure) this.fail(failure);
    this.follow(false);
  }

  figures(timing, wasStopped) {
    const tokens = timing.usage?.completion_tokens ?? null;
    const ttft = timing.firstAt ? timing.firstAt - timing.sentAt : null;
    const apart = timing.lastAt - timing.firstAt;
    const cameTogether = tokens > 1 && apart / (tokens - 1) < MIN_APART_MS;
    const tpot = tokens > 1 && !cameTogether ? apart / (tokens - 1) : null;
    const cached = timing.usage?.prompt_tokens_details?.cached_tokens ?? null;
    this.onStats({ ttft, tpot, tokens, cached });
    const parts = [];
    if (wasStopped) parts.push("stopped");
    else if (timing.reason === "length") parts.push("cut off at the length limit");
    if (tokens) parts.push(`${tokens} tokens`);
    if (ttft !== null) parts.push(`${cameTogether ? "all" : "first"} after ${Math.round(ttft)} ms`);
    if (tpot !== null) parts.push(`then ${tpot < 10 ? tpot.toFixed(1) : Math.round(tpot)} ms each`);
    return parts.join(" · ");
  }

  showBusy(isBusy) {
    $("send").hidden = isBusy;
    $("stop").hidden = !isBusy;
    log.setAttribute("aria-busy", String(isBusy));
    if (isBusy) this.say("Answering.");
  }

  /** Shows an error below the conversation, with a button to try again. */
  async fail(error) {
    if (error.code === "model_not_found") this.forgetModel();
    if (error.status === 401 && (await this.askKey())) {
      this.answer();
      return;
    }
    const text = el("p", {}, el("strong", {}, titleOf(error)), " ", error.message);
    const retry = el("button", { type: "button", class: "quiet" }, "Try again");
    retry.addEventListener("click", () => {
      if (this.isBusy) return;
      const last = this.turns.at(-1);
      this.cut(this.turns.length - (last?.role === "assistant" ? 1 : 0));
      this.answer();
    });
    this.dismiss();
    this.notice = el("div", { class: "notice", role: "alert" }, text, retry);
    log.append(this.notice);
    if (error.retryAfter) countDown(retry, error.retryAfter);
    this.follow(true);
  }
}

/** Shows an answer so far: the folded reasoning and the text. */
function show(turn) {
  if (turn.thoughts && !turn.folded) {
    turn.folded = el("details", { class: "thoughts" }, el("summary", {}, "Thoughts"), el("div"));
    turn.body.before(turn.folded);
  }
  if (turn.folded) turn.folded.lastElementChild.textContent = turn.thoughts;
  turn.shown.update(turn.content);
}

function titleOf(error) {
  if (error.status === 0) return "No connection.";
  if (error.status === 401) return "An API key is needed.";
  if (error.status === 429 || error.code === "overloaded") return "Too much to do.";
  if (error.status === 503) return "Not ready.";
  return `Error ${error.status}.`;
}

function countDown(button, seconds) {
  const until = performance.now() + 1000 * seconds;
  button.disabled = true;
  const tick = () => {
    const left = Math.ceil((until - performance.now()) / 1000);
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left > 0 && button.isConnected) setTimeout(tick, 250);
  };
  tick();
}

/** Returns whether a key event is Enter outside of the composition of a character. */
export const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
