// Boot: the tabs, dark and light, the key, and which model there is.

import * as api from "./api.js";
import { byId, visible } from "./dom.js";
import { startTalk } from "./talk.js";
import { startWatch } from "./watch.js";

const THEME = "nanovllm-theme";
const TABS = ["talk", "watch"];

function show(name) {
  for (const tab of TABS) {
    const chosen = tab === name;
    byId(tab).hidden = !chosen;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    byId(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  document.dispatchEvent(new CustomEvent("view", { detail: name }));
}

function startTabs() {
  const named = () => (location.hash === "#watch" ? "watch" : "talk");
  for (const tab of TABS) {
    byId(`tab-${tab}`).addEventListener("click", () => (location.hash = tab));
    byId(`tab-${tab}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = TABS[1 - TABS.indexOf(tab)];
      location.hash = other;
      byId(`tab-${other}`).focus();
    });
  }
  window.addEventListener("hashchange", () => show(named()));
  show(named());
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

// One question at a time: whoever needs a key waits for the same answer.
function startKey() {
  let asking = null;
  const dialog = byId("key-dialog");
  const ask = (wasWrong) =>
    (asking ??= new Promise((resolve) => {
      byId("key").hidden = false;
      byId("key-title").textContent = wasWrong
        ? "The server does not know this API key"
        : "This server asks for an API key";
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
    byId("model").title = `${visible(model.id)}: a context of ${model.max_model_len} tokens`;
    document.title = `${visible(model.id).slice(0, 80)} - nanovllm`;
  } catch (error) {
    byId("notice").textContent = error.message;
    byId("notice").hidden = false;
  }
}

startTheme();
startKey();
startTalk();
startWatch();
startTabs();
nameModel();
