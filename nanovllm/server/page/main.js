// Start-up: the tabs, the theme, the API key and the model's name.

import * as api from "./api.js";
import { isKept } from "./conversation.js";
import { byId, visible } from "./dom.js";
import { startTalk } from "./talk.js";
import { startWatch } from "./watch.js";

const THEME = "nanovllm-theme";
const PLAYED = "nanovllm-played";
const TABS = ["watch", "talk"];

function show(name) {
  for (const tab of TABS) {
    const isChosen = tab === name;
    byId(tab).hidden = !isChosen;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(isChosen));
    byId(`tab-${tab}`).tabIndex = isChosen ? 0 : -1;
  }
  document.dispatchEvent(new CustomEvent("view", { detail: name }));
}

// The view that the address names. The default is Talk if this tab has a conversation, else Watch.
function view() {
  const named = location.hash.slice(1);
  if (TABS.includes(named)) return named;
  return isKept() ? "talk" : "watch";
}

function startTabs(watch) {
  for (const tab of TABS) {
    byId(`tab-${tab}`).addEventListener("click", () => (location.hash = tab));
    byId(`tab-${tab}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = TABS[1 - TABS.indexOf(tab)];
      location.hash = other;
      byId(`tab-${other}`).focus();
    });
  }
  window.addEventListener("hashchange", () => show(view()));
  // Sample requests start by themselves once a tab, and only for a visitor without a destination.
  const isFirst = !location.hash && view() === "watch" && sessionStorage.getItem(PLAYED) === null;
  show(view());
  if (isFirst) {
    sessionStorage.setItem(PLAYED, "yes");
    watch.playOnce();
  }
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => sessionStorage.getItem(THEME);
  const apply = () => {
    const isDark = chosen() ? chosen() === "dark" : system.matches;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    byId("theme").textContent = isDark ? "\u2600" : "\u263e";
    document.dispatchEvent(new CustomEvent("theme"));
  };
  byId("theme").addEventListener("click", () => {
    sessionStorage.setItem(THEME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

// One dialog at a time. Requests that need a key while it is open share its result.
function startKey() {
  let asking = null;
  const dialog = byId("key-dialog");
  const ask = (wasWrong) =>
    (asking ??= new Promise((resolve) => {
      byId("key").hidden = false;
      byId("key-title").textContent = wasWrong
        ? "The server rejected this API key"
        : "This server needs an API key";
      byId("key-value").value = "";
      dialog.returnValue = "";
      dialog.addEventListener(
        "close",
        () => {
          asking = null;
          const given = dialog.returnValue === "use" ? byId("key-value").value.trim() : "";
          if (given) api.storeKey(given);
          resolve(Boolean(given));
        },
        { once: true },
      );
      dialog.showModal();
    }));
  api.onKeyNeeded(ask);
  byId("key").addEventListener("click", () => ask(false));
  byId("key").hidden = api.storedKey() === null;
}

async function nameModel() {
  try {
    const model = await api.model();
    byId("model").textContent = visible(model.id);
    byId("model").title = `${visible(model.id)}: context of ${model.max_model_len} tokens`;
    byId("honest").hidden = model.id !== api.DEMO;
    document.title = `${visible(model.id).slice(0, 80)} - nanovllm`;
  } catch (error) {
    byId("notice").textContent = error.message;
    byId("notice").hidden = false;
  }
}

startTheme();
startKey();
startTalk();
startTabs(startWatch());
nameModel();
