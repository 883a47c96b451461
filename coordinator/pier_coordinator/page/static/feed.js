// The line to the coordinator. A browser's own reconnecting gives up on some errors: then this starts over.
const LONGEST = 15_000;

// onLocked gets what to call once a token has been given.
export function follow(onBoard, onState, onLocked) {
  let wait = 500;
  let source = null;

  function open() {
    source = new EventSource("/api/stream");
    source.addEventListener("board", (event) => {
      wait = 500;
      onState("live");
      onBoard(JSON.parse(event.data));
    });
    source.onopen = () => onState("live");
    source.onerror = async () => {
      onState("reconnecting");
      if (source.readyState !== EventSource.CLOSED) return;
      if (await isLocked()) return onLocked(open);
      setTimeout(open, wait * (0.5 + Math.random()));
      wait = Math.min(2 * wait, LONGEST);
    };
  }
  open();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && open());
}

const isLocked = () => fetch("/api/events?limit=0").then((answer) => answer.status === 401, () => false);

export async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
