// Connects the page's parts: the composer, the panels and the key.

import { call, key } from "./api.js";
import { Chat, isSend } from "./chat.js";
import { LiveView } from "./live.js";
import { el } from "./markdown.js";
import { makeFields } from "./settings.js";

const $ = (id) => document.getElementById(id);
const IDEAS = [
  "Tell me a long story about a fox",
  "What is 7 times 8?",
  "Write a short poem about rain",
  "Tell me a joke",
];
const prompt = $("prompt");
const live = new LiveView();
const chat = new Chat({
  askKey,
  findModel,
  forgetModel: () => {
    model = "";
  },
  onStats: (stats) => live.showChat(stats),
});

// ---- the key

let asking = null;

/** Resolves to whether a key was given; calls at the same time share one dialog. */
function askKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-wrong").hidden = !key.get();
    $("key").value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener(
      "close",
      () => {
        const given = dialog.returnValue === "ok" && $("key").value.trim();
        if (given) key.set(given);
        $("key").value = "";
        $("forget-key").hidden = !key.get();
        asking = null;
        resolve(Boolean(given));
        if (given) live.restart();
        prompt.focus();
      },
      { once: true },
    );
  });
  return asking;
}

$("key-cancel").addEventListener("click", () => $("key-dialog").close(""));
$("forget-key").hidden = !key.get();
$("forget-key").addEventListener("click", () => {
  key.forget();
  $("forget-key").hidden = true;
  live.restart();
});

// ---- the composer

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 240)}px`;
}

prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (isSend(event)) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.send(prompt.value)) {
    prompt.value = "";
    grow();
  }
});
$("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.isBusy) chat.stop();
});
$("new-chat").addEventListener("click", () => chat.clear());
for (const idea of IDEAS) {
  const button = el("button", { type: "button" }, idea);
  button.addEventListener("click", () => {
    chat.send(idea);
    prompt.focus();
  });
  $("ideas").append(el("li", {}, button));
}

// ---- the panels

const isWide = matchMedia("(min-width: 62rem)");

function show(name, isShown) {
  $(name).hidden = !isShown;
  $(`${name}-toggle`).setAttribute("aria-expanded", String(isShown));
  if (name === "engine") live.setShown(isShown);
}

for (const name of ["settings", "engine"]) {
  $(`${name}-toggle`).addEventListener("click", () => {
    const isShown = $(name).hidden;
    if (isShown && !isWide.matches) show(name === "engine" ? "settings" : "engine", false);
    show(name, isShown);
  });
}
isWide.addEventListener("change", () => show("engine", isWide.matches));

// ---- start

let model = "";

async function findModel() {
  if (model) return model;
  const { data } = await (await call("/v1/models")).json();
  setModel(data[0].id);
  if (data.length > 1) offerModels(data);
  return model;
}

function setModel(name) {
  model = name;
  $("model").textContent = model;
  document.title = `${model} · mergestep`;
}

// ---- several models

const STATES_MS = 5000;

/** Offers the models with their states. */
function showModels(data) {
  if (document.activeElement === $("models")) return; // it may be open
  const items = data.map(({ id, state }) =>
    el("option", { value: id }, `${id} (${(state ?? "").replaceAll("_", " ")})`),
  );
  $("models").replaceChildren(...items);
  $("models").value = model;
}

/** Lets the user choose one of several models, and reads their states from time to time. */
function offerModels(data) {
  showModels(data);
  live.setModel(model);
  if (!$("models").hidden) return;
  $("models").hidden = false;
  $("model").hidden = true;
  setInterval(async () => {
    if (document.hidden) return;
    try {
      showModels((await (await call("/v1/models")).json()).data);
    } catch {
      // the next time
    }
  }, STATES_MS);
}

$("models").addEventListener("change", () => {
  setModel($("models").value);
  live.setModel(model);
});

async function look() {
  try {
    await findModel();
  } catch (error) {
    if (error.status === 401) {
      $("model").textContent = "needs a key";
      if (await askKey()) await look();
      return;
    }
    $("model").textContent = error.code === "model_not_ready" ? "loading" : "not reachable";
    setTimeout(look, 2000);
  }
}

makeFields();
show("engine", isWide.matches);
prompt.focus();
await look();
