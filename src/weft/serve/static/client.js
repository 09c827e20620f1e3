// The server's routes: what is asked of a model, and what it answers.

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = () => {
  const token = sessionStorage.getItem("weft-token");
  return { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
};

const ask = async (path, body, signal) => {
  const init = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...init, headers: headers(), signal });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new RequestError(response.status, error?.message ?? `${response.status} ${response.statusText}`);
};

export const pathOf = (model, method) => `v1/models/${encodeURIComponent(model)}/${method}`;
export const listModels = async () => (await (await ask("v1/models")).json()).data;
export const post = async (model, method, body, signal) => (await ask(pathOf(model, method), body, signal)).json();

// Yield the events of a stream as [name, data].
export const stream = async function* (model, body, signal) {
  const response = await ask(pathOf(model, "stream"), body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n"),
        line = (key) => lines.find((text) => text.startsWith(`${key}: `))?.slice(key.length + 2);
      const name = line("event") ?? "token",
        data = JSON.parse(line("data"));
      if (name === "error") throw new RequestError(503, data.error.message);
      yield [name, data];
    }
  }
};
