// Stores chats and the texts of their documents in this browser (IndexedDB). The API key is not stored.

const STORES = { chats: "id", documents: "id" };

let database = null;

/** Opens the database. Returns false if the browser stores nothing, as in some private windows; the page then works
 * without a database. */
export async function openStore() {
  if (database) return true;
  try {
    const opening = indexedDB.open("shadowkv", 1);
    opening.addEventListener("upgradeneeded", () => {
      for (const [name, keyPath] of Object.entries(STORES)) opening.result.createObjectStore(name, { keyPath });
    });
    database = await finished(opening);
  } catch {
    return false;
  }
  return true;
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}

/** All values of a store. */
export async function all(store) {
  return database ? finished(database.transaction(store).objectStore(store).getAll()) : [];
}

/** The value with a key; undefined if there is none. */
export async function one(store, key) {
  return database ? finished(database.transaction(store).objectStore(store).get(key)) : undefined;
}

/** Stores a value; replaces an older value with the same key. Fails if the browser has no more room. */
export async function put(store, value) {
  if (database) await finished(database.transaction(store, "readwrite").objectStore(store).put(value));
}

export async function remove(store, key) {
  if (database) await finished(database.transaction(store, "readwrite").objectStore(store).delete(key));
}
