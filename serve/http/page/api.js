// Calls the server with the API key that this tab keeps.

const KEY = "mergestep.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** An answer other than 2xx, or the reason why there is no answer (status 0). */
export class CallError extends Error {
  constructor(status, message, { code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

async function toError(response) {
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const retryAfter = Number.isFinite(seconds) ? Math.min(Math.max(seconds, 1), 3600) : null;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // the body is not an error of this server but, for example, a proxy's page
  }
  const message = typeof error.message === "string" ? error.message : "The server gave no reason.";
  return new CallError(response.status, message, { code: error.code, retryAfter });
}

/** Returns a 2xx response; throws CallError otherwise. body: sent as JSON. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(0, "The server does not answer.");
  }
  if (!response.ok) throw await toError(response);
  return response;
}

/**
 * Yields the parsed data of each server-sent event until [DONE] or the end of the stream, with
 * arrivedAt, the time at which its last bytes came: it is the same for events that came together.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const arrivedAt = performance.now();
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data === "[DONE]") return;
        if (data) yield { ...JSON.parse(data), arrivedAt };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
