// The line to the coordinator. A browser's own reconnecting gives up on some errors: then this starts over.
const LONGEST = 15_000;

export function follow(onBoard, onState) {
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
    source.onerror = () => {
      onState("reconnecting");
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(open, wait * (0.5 + Math.random()));
      wait = Math.min(2 * wait, LONGEST);
    };
  }
  open();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && open());
}

export async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
