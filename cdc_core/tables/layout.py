"""Where the tables of a lakehouse are, and the value that names each of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote

from cdc_core.sql.names import identifier

_PLAIN = re.compile(r"[A-Za-z0-9_-]*")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]")
_CUT = re.compile(r"%[0-9A-F]?$")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_HOST = re.compile(r"(?:file:)?//[^/]", re.IGNORECASE)
_SHELL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?[~$]")
_LOGIN = re.compile(r"(://[^/:@]*:)[^/@]*(?=@)")
_WEB = re.compile(r"https?:", re.IGNORECASE)
SCHEMA_PREFIX = re.compile(r"[A-Za-z0-9_]*")
"""What may stand before the names of schemas in a catalog."""
_NO_BUCKET = re.compile(r"(?:s3a?|gs|abfss?):(?!//[^/])", re.IGNORECASE)


@dataclass(frozen=True)
class TableRef:
    """The name of one table, for name-based APIs.

    `identifier` is one SQL identifier: ``delta.`/root/silver/shop/orders` `` or ``catalog.schema.table`` with each part
    quoted. `path` is the folder of a path-based table, None in a catalog.
    """

    identifier: str
    path: str | None = None

    def __str__(self) -> str:
        return self.identifier

    @property
    def label(self) -> str:
        """The name for messages: the path, or the catalog name without quotes."""
        return self.path if self.path is not None else self.identifier.replace("`", "")

    @property
    def key(self) -> str:
        """Equal for two names of one table: catalogs ignore case, folders do not."""
        return self.path if self.path is not None else self.identifier.lower()

    @staticmethod
    def at(path: str) -> TableRef:
        """The path-based table in the folder `path`."""
        # SQL and DataFrame writers both accept this name, without a metastore: two applications on one lakehouse would
        # need the same one, and Hive's embedded metastore allows a single process.
        return TableRef(f"delta.{identifier(path)}", path)

    @staticmethod
    def named(*parts: str) -> TableRef:
        """The catalog table `parts[0].parts[1]…`."""
        return TableRef(identifier(*parts))


class Layer(StrEnum):
    """The layers, each of which can be compared with the source. Silver and gold, which hold documents as rows, can be
    rebuilt.
    """

    BRONZE = "bronze"
    SILVER = "silver"
    GOLD = "gold"


MAX_FOLDER = 255
"""Bytes that file systems allow in a folder's name."""

LOG = "_delta_log"
"""The folder of a table's log: the only folder name that no collection gets."""

MAX_CATALOG = 255
"""Characters that catalogs allow in the name of a table or a schema."""


SPARK_CATALOG = "spark_catalog"
"""The catalog that every Spark has, with its own metastore or without one."""

OF_HIVE = (SPARK_CATALOG, "hive_metastore")
"""Catalogs that do not allow `-` in names."""


def path_name(name: str) -> str:
    """A database's or collection's name as a folder: bytes outside ``[A-Za-z0-9_-]`` are percent-encoded.

    A name too long for file systems is cut, and gets `~` and a digest of the whole.
    """
    if name == LOG:  # the parent folder would look like a Delta table
        return name.replace("_", "%5F", 1)
    if _PLAIN.fullmatch(name) and len(name) <= MAX_FOLDER:
        return name
    # `quote` keeps these two: a dot would hide a folder or mean its parent, and `~` marks a name that was cut.
    encoded = quote(name, safe="").replace(".", "%2E").replace("~", "%7E")
    return encoded if len(encoded) <= MAX_FOLDER else f"{_CUT.sub('', encoded[:180])}~{_digest(name)}"


def _digest(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _shortened(text: str, *names: str) -> str:
    """A name made of `names`, cut and with their digest if it is too long for catalogs."""
    return text if len(text) <= MAX_CATALOG else f"{text[:180]}_{_digest(*names)}"


def catalog_name(name: str) -> str:
    """A database's or collection's name in a catalog: characters outside ``[A-Za-z0-9_-]`` become ``_``."""
    return _NOT_PLAIN.sub("_", name)


def is_relative(root: str) -> bool:
    """Whether a root depends on the working directory."""
    return not (root.startswith("/") or _SCHEME.match(root))


def unusable(root: str) -> str | None:
    """Why a root cannot be used, and what to write instead; None if it can."""
    if _SHELL.match(root):
        return "no shell replaces ~ or $NAME here: write the whole path, or ${env:HOME}/… in the settings file"
    if _WEB.match(root):
        return "a web address is no folder: the URL of a bucket begins with s3a://, abfss:// or gs://"
    if _NO_BUCKET.match(root):
        return "the URL of a bucket is written as s3a://bucket/folder"
    if _HOST.match(root):
        return "a path begins with one /, the URL of a folder of this machine with file:///"
    if _SCHEME.match(root) and not root.partition(":")[2].startswith("/"):
        return "a URL goes on with a / behind its colon; a relative path with a colon begins with ./"
    if _LOGIN.search(root):
        return "credentials are not part of a URL, which every message shows: lakehouse.store has them"
    return None


def without_login(root: str) -> str:
    """A root as messages may show it: a password in its URL is left out."""
    return _LOGIN.sub(r"\1…", root)


FOLDERS = frozenset({"bronze", "silver", "gold", "quarantine", "ops"})
"""The folders below a lakehouse's root."""

SHADOW_FOLDERS = ("ops", "rebuild")
"""The path below the root of tables that a rebuild makes while it runs."""


@dataclass(frozen=True)
class Layout:
    """The tables of one lakehouse: below a root folder, or in a catalog as ``<prefix><layer>.<db>__<collection>``."""

    root: str | None = None
    catalog: str | None = None
    schema_prefix: str = ""

    def under(self, directory: str) -> Layout:
        """The same layout; a relative root is made absolute below `directory`."""
        if self.root is None or not is_relative(self.root):
            return self
        relative = self.root[2:] if self.root.startswith("./") else self.root
        absolute_root = directory.rstrip("/") if relative in ("", ".") else f"{directory.rstrip('/')}/{relative}"
        return replace(self, root=absolute_root)

    def bronze(self, name: str) -> TableRef:
        """The log of all events of the pipeline `name`."""
        return self._table("bronze", name)

    def silver(self, db: str, collection: str) -> TableRef:
        """The documents of one collection, with the engine's columns."""
        return self._table("silver", db, collection)

    def gold(self, db: str, collection: str) -> TableRef:
        """The current documents of one collection, for analysts."""
        return self._table("gold", db, collection)

    def history(self, db: str, collection: str) -> TableRef:
        """The versions of one collection's documents, next to its gold table."""
        return self._table("gold", db, f"{collection}_history")

    def model(self, name: str) -> TableRef:
        """The rows of one SQL model."""
        return self._table("gold", *((name,) if self.root is None else ("models", name)))

    def quarantine(self, db: str, collection: str) -> TableRef:
        """The events of one collection that could not be read."""
        return self._table("quarantine", db, collection)

    def deletes(self, db: str, collection: str) -> TableRef:
        """The remembered deletes of one collection."""
        if self.root is None:
            return self._table("ops", f"deletes__{catalog_name(db)}__{catalog_name(collection)}")
        return self._table("ops", "deletes", db, collection)

    def shadow(self, db: str, collection: str, attempt: str = "") -> Layout:
        """Where one collection's tables are rebuilt before they replace the current ones.

        Below a root, each attempt has its own folder; without `attempt` it is their parent folder.
        """
        # A catalog has no folders: the shadow has schemas of its own, under a longer prefix.
        if self.root is None:
            names = f"{catalog_name(db)}__{catalog_name(collection)}"
            return replace(self, schema_prefix=f"{self.schema_prefix}rebuild_{names}_")
        folders = (*SHADOW_FOLDERS, path_name(db), path_name(collection), attempt)
        return replace(self, root="/".join((self.root.rstrip("/"), *filter(None, folders))))

    def collisions(self, namespaces: Sequence[tuple[str, str]]) -> list[tuple[str, str, str]]:
        """Pairs of collections that would have one table: ``(first, second, the table)``, in the order given."""
        if self.root is not None:  # folders tell all names apart (`path_name`)
            return []
        owners: dict[str, tuple[str, str]] = {}
        conflicts = []
        for namespace in namespaces:
            table = self.silver(*namespace)
            if (owner := owners.setdefault(table.key, namespace)) != namespace:
                conflicts.append((".".join(owner), ".".join(namespace), table.label))
        return conflicts

    def schema(self, layer: str) -> str:
        """The catalog schema of a layer's tables, as a SQL identifier."""
        return identifier(*self._schema(layer))

    def ops(self, name: str) -> TableRef:
        """A table about the pipeline itself: schemas, expectations, notifications, signals."""
        return self._table("ops", name)

    def _table(self, layer: str, *names: str) -> TableRef:
        if self.root is not None:
            return TableRef.at("/".join((self.root.rstrip("/"), layer, *map(path_name, names))))
        return TableRef.named(*self._schema(layer), self._name(*names))

    def _name(self, *names: str) -> str:
        """A table's name in a catalog."""
        return self._allowed(_shortened("__".join(map(catalog_name, names)), *names))

    def _schema(self, layer: str) -> list[str]:
        assert self.root is None
        schema = f"{self.schema_prefix}{layer}"
        return [*filter(None, (self.catalog, self._allowed(_shortened(schema, schema))))]

    def _allowed(self, name: str) -> str:
        """The name in the form that the catalog allows."""
        return name.replace("-", "_") if self.catalog in OF_HIVE else name
