// The sampling controls. An empty control is not sent, so that the server's default applies.

import { el } from "./markdown.js";

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, max: 100000, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Max tokens", { min: 1, max: 10000000, step: 1 }],
  ["seed", "Seed", { min: 0, max: 9007199254740991, step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 100, step: 0.05 }],
];

const inputs = new Map();
const system = document.getElementById("system");

export function makeFields() {
  const parent = document.getElementById("fields");
  for (const [name, title, limits] of FIELDS) {
    const input = el("input", {
      type: "number",
      id: `field-${name}`,
      inputmode: limits.step === 1 ? "numeric" : "decimal",
      placeholder: "default",
      ...limits,
    });
    inputs.set(name, input);
    parent.append(el("label", {}, title, input));
  }
}

/** Returns the values of the controls by the API's parameter names. */
export function sampling() {
  const found = {};
  for (const [name, , limits] of FIELDS) {
    const number = inputs.get(name).valueAsNumber;
    if (Number.isFinite(number)) found[name] = limits.step === 1 ? Math.round(number) : number;
  }
  return found;
}

export const systemMessages = () =>
  system.value.trim() ? [{ role: "system", content: system.value }] : [];
