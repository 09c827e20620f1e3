// The page: a model, what to do with it, the form and the answers. All of it is in the address's hash, so it can be shared.
import { make } from "./look/page.js";
import { RequestError, listModels, pathOf, post, stream } from "./client.js";
import { details, text } from "./elements.js";
import { modesOf, peersOf } from "./tasks.js";

const $ = (id) => document.getElementById(id);
let models = [],
  state = null,
  running = null;

const find = (name) => models.find(({ id }) => id === name);
const wayOf = ({ model, mode }) => modesOf(model)[mode];

// The hash: the model, the mode, the fields by their names, and options with a prefix.
const hashOf = ({ model, other, mode, input, options }) => {
  const parts = new URLSearchParams({ model: model.id, mode, ...(other && { with: other.id }) });
  for (const [name, value] of Object.entries(input)) if (value) parts.set(`in.${name}`, value);
  for (const [name, value] of Object.entries(options)) parts.set(`option.${name}`, value);
  return `#${parts}`;
};
const readHash = () => {
  const parts = new URLSearchParams(location.hash.slice(1)),
    part = (prefix) =>
      Object.fromEntries(
        [...parts]
          .filter(([name]) => name.startsWith(prefix))
          .map(([name, value]) => [name.slice(prefix.length), value]),
      );
  return {
    model: find(parts.get("model")),
    other: find(parts.get("with")),
    mode: parts.get("mode"),
    input: part("in."),
    options: part("option."),
  };
};
const complete = ({ model = models[0], other, mode, input = {}, options = {} }) => {
  const modes = modesOf(model),
    chosen = Object.hasOwn(modes, mode ?? "") ? mode : Object.keys(modes)[0];
  const way = modes[chosen],
    given = way.fields.some(({ name }) => input[name]);
  return {
    model,
    mode: chosen,
    other: peersOf(model, chosen, models).includes(other) ? other : undefined,
    options,
    input: given
      ? Object.fromEntries(way.fields.map(({ name }) => [name, input[name] ?? ""]))
      : inputOf(way.examples(model)[0] ?? {}, way),
  };
};

// An example as the texts of the form's fields, and back.
const inputOf = (example, way) =>
  Object.fromEntries(
    way.fields.map(({ name, lines }) => [name, lines ? (example[name] ?? []).join("\n") : (example[name] ?? "")]),
  );
const exampleOf = (input, way) =>
  Object.fromEntries(
    way.fields
      .filter(({ name, optional }) => input[name] || !optional)
      .map(({ name, lines }) => [name, lines ? input[name].split("\n").filter((line) => line.trim()) : input[name]]),
  );
const optionsOf = (way, model, given) =>
  Object.fromEntries(
    way.options.map(({ name, check, initial }) => {
      const value = given[name] ?? initial(model.options ?? {});
      return [name, check ? String(value) === "true" : Number(value)];
    }),
  );

const field = ({ name, label, rows, insert }) => {
  const area = make("textarea", {
    id: `in-${name}`,
    name,
    rows,
    value: state.input[name],
    dir: "auto",
    spellcheck: false,
    oninput: () => {
      state.input[name] = area.value;
    },
  });
  const add = () => {
    area.setRangeText(insert, area.selectionStart, area.selectionEnd, "end");
    state.input[name] = area.value;
    area.focus();
  };
  return make("div", { className: "field" }, [
    make("div", { className: "line" }, [
      make("label", { htmlFor: area.id, textContent: label }),
      ...(insert
        ? [make("button", { type: "button", className: "chip", textContent: `Insert ${insert}`, onclick: add })]
        : []),
    ]),
    area,
  ]);
};
const option =
  (values) =>
  ({ name, label, check, min, max, step }) => {
    const input = make(
      "input",
      check
        ? { type: "checkbox", checked: values[name] }
        : { type: "number", min, max, step, value: values[name], required: true },
    );
    input.onchange = () => {
      state.options[name] = check ? input.checked : input.value;
    };
    return make("label", {}, check ? [input, ` ${label}`] : [`${label} `, input]);
  };
const example = (way) => (each) => {
  const content = [Object.values(each)[0]].flat().join(" / ");
  return make("button", {
    type: "button",
    className: "chip",
    textContent: content.length > 60 ? `${content.slice(0, 59)}\u2026` : content,
    dir: "auto",
    onclick: () => {
      state.input = inputOf(each, way);
      draw();
      run();
    },
  });
};
const choices = (select, list, chosen) => {
  select.replaceChildren(
    ...list.map(([value, label]) => make("option", { value, textContent: label, selected: value === chosen })),
  );
};
const size = (parameters) =>
  parameters >= 1e6 ? `${(parameters / 1e6).toFixed(1)} million` : parameters.toLocaleString("en");

const draw = () => {
  const { model, other, mode } = state,
    modes = modesOf(model),
    way = modes[mode],
    peers = peersOf(model, mode, models);
  choices(
    $("model"),
    models.map(({ id }) => [id, id]),
    model.id,
  );
  choices($("other"), [["", "none"], ...peers.map(({ id }) => [id, id])], other?.id ?? "");
  $("other-label").hidden = !peers.length;
  $("about").textContent = `${model.model} for ${model.task}, ${size(model.parameters)} parameters`;
  $("modes").replaceChildren(
    ...Object.entries(modes).map(([name, { label }]) =>
      make("a", {
        href: hashOf(complete({ ...state, mode: name, options: {} })),
        textContent: label,
        ...(name === mode && { ariaCurrent: "page" }),
      }),
    ),
  );
  $("modes").hidden = Object.keys(modes).length < 2;
  const focused = document.activeElement?.id;
  $("fields").replaceChildren(...way.fields.map(field));
  $("examples").replaceChildren(...way.examples(model).map(example(way)));
  $("examples").hidden = !$("examples").childElementCount;
  $("options").hidden = !way.options.length;
  $("options").lastElementChild.replaceChildren(...way.options.map(option(optionsOf(way, model, state.options))));
  if (focused?.startsWith("in-")) $(focused)?.focus();
  document.title = `${model.id}: ${way.label} \u2013 weft`;
};

const quoted = (value) => `'${value.replaceAll("'", "'\\''")}'`;
const curl = (path, body) =>
  `curl ${new URL(path, location.href)} -H 'content-type: application/json' -d ${quoted(JSON.stringify(body))}`;

// Ask one model and show its answer in a box.
const answer = async (model, signal, box) => {
  const way = modesOf(model)[state.mode],
    example = exampleOf(state.input, way),
    calls = [];
  let took = 0;
  const options = way.call?.(optionsOf(way, model, state.options)) ?? {};
  const note = (method, body) => {
    calls.push(curl(pathOf(model.id, method), body));
    return body;
  };
  const timed = async (reply, started = performance.now()) => {
    const data = await reply;
    took ||= performance.now() - started;
    return data;
  };
  const timedStream = async function* (events, started = performance.now()) {
    yield* events;
    took = performance.now() - started;
  };
  const call = {
    model,
    example,
    options,
    link: (mode) => hashOf({ ...state, model, other: undefined, mode, options: {} }),
    ask: (method, body) => timed(post(model.id, method, note(method, body), signal)),
    stream: (body) => timedStream(stream(model.id, note("stream", body), signal)),
  };
  try {
    if (way.run) await way.run(box, call);
    else await way.show(box, call, await call.ask("predict", { examples: example, options }));
  } catch (error) {
    if (signal.aborted) return;
    if (error.status === 401) return askToken();
    box.append(
      make("p", {
        className: "error",
        role: "alert",
        textContent: error instanceof RequestError ? error.message : `${error}`,
      }),
    );
    if (!(error instanceof RequestError)) throw error;
  }
  box.append(details("As a command", [make("pre", { textContent: calls.join("\n"), tabIndex: 0 })]));
  return took;
};

const run = async () => {
  running?.abort();
  const controller = (running = new AbortController()),
    asked = [state.model, state.other].filter(Boolean);
  history.replaceState(null, "", hashOf(state));
  const boxes = asked.map(() => make("div", { className: "answer-box" }));
  $("results").replaceChildren(
    ...asked.map((model, i) =>
      make("article", {}, [
        ...(asked.length > 1 ? [make("h3", { className: "who", textContent: model.id })] : []),
        boxes[i],
      ]),
    ),
  );
  $("results").classList.toggle("two", asked.length > 1);
  $("results").ariaBusy = "true";
  $("run").textContent = "Stop";
  $("status").textContent = "";
  const times = await Promise.allSettled(asked.map((model, i) => answer(model, controller.signal, boxes[i])));
  if (running !== controller) return;
  const [slowest] = times.map(({ value }) => value ?? 0).sort((a, b) => b - a);
  running = null;
  $("results").ariaBusy = "false";
  $("run").textContent = "Run";
  $("status").textContent = controller.signal.aborted
    ? "Stopped"
    : slowest
      ? `Answered in ${slowest.toFixed(0)} ms`
      : "";
  for (const { reason } of times) if (reason) throw reason;
};

const go = (next, push = true) => {
  const unchanged =
    state &&
    wayOf(state)
      .examples(state.model)
      .some((each) => hashOf({ ...state, input: inputOf(each, wayOf(state)) }) === hashOf(state));
  state = complete({ ...next, input: push && unchanged && next.model !== state.model ? {} : next.input });
  if (push) history.pushState(null, "", hashOf(state));
  draw();
  run();
};

const say = (problem) => {
  $("problem").hidden = !problem;
  $("problem").textContent = problem;
};
const askToken = () => {
  const given = sessionStorage.getItem("weft-token") !== null;
  say(given ? "The token is wrong." : "");
  $("token").hidden = false;
  $("playground").hidden = true;
  $("secret").focus();
};
const start = async () => {
  try {
    models = await listModels();
  } catch (error) {
    if (error.status === 401) return askToken();
    return say(`The server does not answer: ${error.message}`);
  }
  say("");
  models = models.filter((model) => Object.keys(modesOf(model)).length);
  $("token").hidden = true;
  $("playground").hidden = !models.length;
  if (models.length) go(readHash(), false);
};

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("weft-token", $("secret").value);
  start();
});
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  run();
});
$("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if ($("form").reportValidity()) run();
  }
});
$("model").addEventListener("change", () => go({ ...state, model: find($("model").value), options: {} }));
$("other").addEventListener("change", () => go({ ...state, other: find($("other").value) }));
window.addEventListener("popstate", () => {
  if (models.length) go(readHash(), false);
});
start();
