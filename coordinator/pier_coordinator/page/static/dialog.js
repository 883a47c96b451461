// One dialog for everything. It closes when its work is done; when that fails it says why, and stays.
import { $, say } from "./dom.js";

let work = null;

export function openDialog(title, body, ok = "", onOk = null) {
  const dialog = $("dialog");
  work = onOk;
  say($("dialog-title"), title);
  say($("dialog-problem"), "");
  $("dialog-body").replaceChildren(...body);
  $("dialog-ok").hidden = !onOk;
  say($("dialog-ok"), ok);
  say($("dialog-cancel"), onOk ? "Cancel" : "Close");
  if (!dialog.open) dialog.showModal();
}

export function listenToDialog() {
  const dialog = $("dialog");
  $("dialog-cancel").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const mine = work;
    if (!mine) return;
    $("dialog-ok").disabled = true;
    try {
      await mine();
      if (work === mine) dialog.close();
    } catch (error) {
      say($("dialog-problem"), error.message);
    } finally {
      $("dialog-ok").disabled = false;
    }
  });
}
