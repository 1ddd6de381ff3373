"""Settings from a Debezium connector: which properties are taken over, which are left out and why, and which hold secrets.

`cdc_core.properties.source` defines the properties with types and defaults; `cdc_core.settings.source_section` reads
and cross-checks them.

    source properties            under `source`; those of older versions under their current names
    ExtractNewDocumentState      its options under `silver.defaults`
    debezium.source.…            Debezium Server: the same properties without the prefix
    topic.prefix, mongodb.name   the pipeline's `name`
    passwords                    references `${env:…}`; the values are dropped and appear in no result

Sources: Debezium "MongoDB connector", connector properties, current and 1.x (`mongodb.hosts`, `*.whitelist`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cdc_core import errors
from cdc_core.properties import source as properties
from cdc_core.properties import types as values
from cdc_core.properties import unwrap as unwrap_options
from cdc_core.settings import parse as settings

CONNECTOR = "io.debezium.connector.mongodb.MongoDbConnector"
OLDER: tuple[str, ...] = (*properties.RENAMED, "mongodb.hosts", "mongodb.name", "mongodb.members.auto.discover")
"""All names of older versions that are translated."""

REMARKS: Mapping[str, str] = {
    "max.batch.size": "taken over; it bounds one Delta commit here: leave it out and a commit holds 100000 events",
    "snapshot.mode.custom.name": "a Python class is expected here, as package.module:Class",
}
"""Remarks about properties that are taken over."""

_SERVER, _SERVER_SOURCE = "debezium.", "debezium.source."
"""Prefixes of Debezium Server's properties, and of those of its source connector."""

_SERVER_ONLY: Mapping[str, str] = {
    "debezium.sink.": "events go to the tables of the lakehouse",
    "debezium.format.": "events go to the tables of the lakehouse, in types of Delta",
    "debezium.predicates": "only ExtractNewDocumentState is applied here, to every event",
}
"""Prefixes of Debezium Server's properties that have no meaning here, and why."""

_INSTEAD: Mapping[str, str] = {
    "ReplaceField": "field.exclude.list removes fields, field.renames renames them",
    "MaskField": "field.exclude.list removes fields",
    "Filter": "cursor.pipeline leaves events out",
}
"""The properties to use instead of other transformations: what one of these leaves out would reach the tables."""

_AROUND_CONFIG = ("name", "config", "tasks", "type")
"""What Kafka Connect's REST API says of a connector."""

_NOT_OURS = "it configures Debezium Server"
_CHANNELS = ("signal.enabled.channels", "notification.enabled.channels")
_NO_CHANNELS = {"jmx": "there is no Java management here", "in-process": "there is no engine in a Java process here"}
_ENV = re.compile(r"\$\{env:[A-Za-z_][A-Za-z0-9_]*\}")
_LOGIN = re.compile(r'\b(username|password)\s*=\s*"((?:[^"\\]|\\.)*)"')
"""User and password in `sasl.jaas.config`, of the modules for PLAIN and SCRAM."""
_SECRET_OPTIONS = {name.lower(): variable for name, variable in values.SECRET_OPTIONS.items()}


@dataclass(frozen=True)
class PropertyNote:
    """A property of the connector, and a remark about it."""

    name: str
    why: str


@dataclass(frozen=True)
class Variable:
    """An environment variable to set, and what its value must be."""

    name: str
    holds: str


@dataclass(frozen=True)
class ConnectorImport:
    """A settings document that `settings.parse` accepts, and the `warnings` that it gives."""

    document: Mapping[str, object]
    notes: tuple[PropertyNote, ...]
    variables: tuple[Variable, ...]
    warnings: tuple[str, ...]


def imported(connector: object, *, root: str, where: str = "") -> ConnectorImport:
    """The settings for a connector, given as a flat map of properties, as `{"name": …, "config": {…}}`, or as properties
    of Debezium Server.

    Raises `SettingsError` with all mistakes, each under the connector's name for the property: values outside the
    closed sets, unknown properties with the nearest name, another connector's class. No message contains the value of a
    secret.
    """
    report = _ImportReport()
    connector_properties = _given(connector, where, report)
    if any(name.startswith(_SERVER) for name in connector_properties):
        connector_properties = _of_server(connector_properties, report)
    reader = _ConnectorReader(connector_properties, report)
    reader.read()
    document = reader.document(root)
    warnings: tuple[str, ...] = ()
    try:
        warnings = settings.parse(document, where=where).warnings
    except errors.SettingsError as error:
        report.problems.extend(report.renamed(problem) for problem in error.problems)
    if report.problems:
        raise errors.SettingsError([_located(problem, where) for problem in report.problems])
    return ConnectorImport(document, tuple(report.notes), report.variables(reader.source), warnings)


def _given(connector: object, where: str, report: _ImportReport) -> Mapping[str, object]:
    """The properties that have a value."""
    if isinstance(connector, Mapping) and isinstance(connector.get("config"), Mapping):
        for name in connector:
            if name not in _AROUND_CONFIG:
                report.note(str(name), "it stands beside `config`, which has the properties of a connector")
        connector = connector["config"]
    if not isinstance(connector, Mapping):
        expected = 'a JSON object of properties, or {"name": …, "config": {…}}'
        raise errors.SettingsError(errors.Problem(where, f"{expected} is expected, found {values.kind(connector)}"))
    return {str(name): value for name, value in connector.items() if value is not None}


def _of_server(server_properties: Mapping[str, object], report: _ImportReport) -> Mapping[str, object]:
    """The properties of Debezium Server's source connector and its transformations, under a connector's names."""
    connector_properties = {}
    for name, value in server_properties.items():
        short_name = name.removeprefix(_SERVER_SOURCE)
        if name.startswith(f"{_SERVER}transforms"):
            short_name = name.removeprefix(_SERVER)
        if short_name != name:
            connector_properties[short_name] = value
        else:
            report.note(name, next((reason for start, reason in _SERVER_ONLY.items() if name.startswith(start)), _NOT_OURS))
    return connector_properties


@dataclass
class _ImportReport:
    """The result of an import: remarks and mistakes under the connector's names, and the variables to set."""

    notes: list[PropertyNote] = field(default_factory=list)
    problems: list[errors.Problem] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    holds: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, why: str) -> None:
        self.notes.append(PropertyNote(" ".join(name.split()), why))

    def refuse(self, name: str, message: str, hint: str = "") -> None:
        self.problems.append(errors.Problem(name, message, hint))

    def variable(self, name: str, holds: str) -> str:
        self.holds[name] = holds
        return f"${{env:{name}}}"

    def variables(self, source: Mapping[str, object]) -> tuple[Variable, ...]:
        """The variables that the settings refer to, in the order of the file."""
        variables: dict[str, Variable] = {}
        for name, value in source.items():
            for kind, text in values.Reference(str(value)).parts():
                if kind == "env":
                    variables.setdefault(text, Variable(text, self.holds.get(text, f"what {name} refers to")))
        return tuple(variables.values())

    def renamed(self, problem: errors.Problem) -> errors.Problem:
        """A mistake in the settings under the connector's name for it."""
        return dataclasses.replace(problem, path=self.origins.get(problem.path, problem.path.removeprefix("source.")))


@dataclass
class _ConnectionReader:
    """How to reach the source: the connection string, or `mongodb.hosts` of older versions, with references for secrets."""

    connector: Mapping[str, object]
    report: _ImportReport

    def read(self) -> dict[str, object]:
        """The properties of the connection, for `source`."""
        source: dict[str, object] = {}
        uri = _text(self.connector, "mongodb.connection.string")
        if uri and _text(self.connector, "mongodb.hosts"):
            self.report.note("mongodb.hosts", "mongodb.connection.string stands beside it, and wins")
        if not uri:
            uri = self._from_hosts()
        if "mongodb.members.auto.discover" in self.connector:
            self.report.note(
                "mongodb.members.auto.discover", "the connection string says it: directConnection=true for false"
            )
        if uri:
            source["mongodb.connection.string"] = self._without_secrets(uri)
        if values.login(uri.partition("://")[2]):
            for name in ("mongodb.user", "mongodb.password"):
                if name in self.connector:
                    self.report.note(name, "the connection string holds credentials, which win")
            return source
        if user := _text(self.connector, "mongodb.user"):
            is_foreign = "${" in _ENV.sub("", user)
            source["mongodb.user"] = self.report.variable("MONGODB_USER", "mongodb.user") if is_foreign else user
        if password := _text(self.connector, "mongodb.password"):
            is_reference = _ENV.fullmatch(password) is not None
            reference = password if is_reference else self.report.variable("MONGODB_PASSWORD", "mongodb.password")
            source["mongodb.password"] = reference
        return source

    def _from_hosts(self) -> str:
        """`mongodb.hosts`, `[replica set/]host[:port], …`, as a connection string; empty if there is none."""
        hosts = _text(self.connector, "mongodb.hosts")
        self.report.origins["source.mongodb.connection.string"] = "mongodb.hosts" if hosts else "mongodb.connection.string"
        if not hosts:
            return ""
        if ";" in hosts:
            hint = "a sharded cluster is read through its mongos routers: mongodb.connection.string"
            self.report.refuse("mongodb.hosts", "one replica set is expected", hint)
            # Any valid address, because an empty one would be reported as a second mistake of the same property.
            return "mongodb://one"
        replica_set, slash, host_list = hosts.rpartition("/")
        members = ",".join(values.NameList().read(host_list))
        is_direct = _text(self.connector, "mongodb.members.auto.discover").lower() == "false"
        options = [f"replicaSet={replica_set.strip()}"] if slash else []
        if is_direct:
            members, options = members.partition(",")[0], [*options, "directConnection=true"]
        routers = "if they are config servers, give the mongos routers there"
        self.report.note("mongodb.hosts", f"it is part of mongodb.connection.string now; {routers}")
        return f"mongodb://{members}/" + (f"?{'&'.join(options)}" if options else "")

    def _without_secrets(self, uri: str) -> str:
        """The connection string with references in place of its secrets, or one reference for the whole if that is safer."""
        if "${" in _ENV.sub("", uri) and not uri.startswith(("mongodb://", "mongodb+srv://")):
            return self.report.variable("MONGODB_URI", "the connection string")
        scheme, separator, address = uri.partition("://")
        credentials = values.login(address)
        hosts, question, options = address[len(credentials) :].partition("?")
        delimiter = "&" if "&" in options else ";"
        safe_options = delimiter.join(self._option(option) for option in options.split(delimiter))
        safe_uri = f"{scheme}{separator}{self._credentials(credentials)}{hosts}{question}{safe_options}"
        # An invalid connection string is kept, so that the settings report it.
        is_uri = scheme in ("mongodb", "mongodb+srv")
        return (
            safe_uri if not is_uri or _is_clean(safe_uri) else self.report.variable("MONGODB_URI", "the connection string")
        )

    def _credentials(self, credentials: str) -> str:
        is_reference = credentials.startswith("${")
        user, colon, password = _split_reference(credentials) if is_reference else credentials.partition(":")
        if "${" in _ENV.sub("", user):
            user = self.report.variable("MONGODB_USER", "the user of mongodb.connection.string")
        if password and not _ENV.fullmatch(password):
            password = self.report.variable("MONGODB_PASSWORD", "the password of mongodb.connection.string")
        return f"{user}{colon}{password}"

    def _option(self, option: str) -> str:
        name, _, value = option.partition("=")
        variable = _SECRET_OPTIONS.get(name.lower())
        if variable and value and not _ENV.fullmatch(value):
            return f"{name}={self.report.variable(variable, f'{name} of the connection string')}"
        token = values.SESSION_TOKEN.search(option)
        if token and token[2] and not _ENV.fullmatch(token[2]):
            reference = self.report.variable("AWS_SESSION_TOKEN", "AWS_SESSION_TOKEN of the connection string")
            return option[: token.start(2)] + reference + option[token.end(2) :]
        return option


@dataclass
class _ConnectorReader:
    """Reads one connector's properties into the settings."""

    connector: Mapping[str, object]
    report: _ImportReport
    name: str | None = None
    source: dict[str, object] = field(default_factory=dict)
    unwrap: dict[str, object] = field(default_factory=dict)

    def read(self) -> None:
        self._read_class()
        self._read_name()
        self.source.update(_ConnectionReader(self.connector, self.report).read())
        self._read_transforms()
        done = ("topic.prefix", "transforms", "mongodb.connection.string", "mongodb.user", "mongodb.password", *OLDER[-3:])
        for name in self.connector:
            if name not in done and not name.startswith("transforms."):
                self._read_property(name)
        self._read_brokers()

    def document(self, root: str) -> Mapping[str, object]:
        silver = {"silver": {"defaults": self.unwrap}} if self.unwrap else {}
        return {"name": self.name, "lakehouse": {"root": root}, "source": self.source, **silver}

    def _read_class(self) -> None:
        class_name = self.connector.get("connector.class")
        if class_name is not None and str(class_name).rpartition(".")[2] not in ("MongoDbConnector", "MongoDb"):
            self.report.refuse("connector.class", f"{CONNECTOR} is expected, found {values.shown(class_name)}")

    def _read_name(self) -> None:
        """`topic.prefix`, or `mongodb.name` of older versions; characters that a table's name cannot have become `_`."""
        origins = [name for name in ("topic.prefix", "mongodb.name") if _text(self.connector, name)]
        if not origins:
            self.report.refuse("topic.prefix", "a name for the pipeline is expected")
            self.name = "unnamed"
            return
        origin, *other_origins = origins
        prefix = _text(self.connector, origin)
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", prefix)[:100]
        if self.name != prefix:
            self.report.note(origin, f"the pipeline's name is {self.name}, as it names tables")
        for name in other_origins:
            self.report.note(name, f"{origin} stands beside it, and wins")

    def _read_transforms(self) -> None:
        """Reads the options of the transformation that silver applies; reports others."""
        listed_aliases = values.NameList().read(_text(self.connector, "transforms"))
        unwrap_aliases: list[str] = []
        for alias in unwrap_options.aliases(self.connector):
            kind = _text(self.connector, f"transforms.{alias}.type")
            if listed_aliases and alias not in listed_aliases:
                self.report.note(f"transforms.{alias}", "`transforms` does not list it")
            elif not kind:
                self.report.refuse(f"transforms.{alias}.type", "the class of the transformation is expected")
            elif kind in unwrap_options.CLASSES:
                unwrap_aliases.append(alias)
            else:
                hint = _INSTEAD.get(kind.rpartition(".")[2].partition("$")[0])
                remark = f"only ExtractNewDocumentState is applied here, not {kind}"
                self.report.note(f"transforms.{alias}", f"{remark} ({hint})" if hint else remark)
        for alias in unwrap_aliases[1:]:
            self.report.refuse(f"transforms.{alias}.type", f"{unwrap_aliases[0]} applies ExtractNewDocumentState already")
        for alias in unwrap_aliases[:1]:
            self._read_unwrap(f"transforms.{alias}.")

    def _read_unwrap(self, start: str) -> None:
        for name, value in self.connector.items():
            option = name.removeprefix(start)
            if option in (name, "type"):
                continue
            if option in unwrap_options.IGNORED:
                self.report.note(name, unwrap_options.IGNORED[option])
                continue
            self.report.origins[f"silver.defaults.{option}"] = name
            if option not in unwrap_options.NAMES:
                self.report.refuse(name, "there is no such option", values.did_you_mean(option, unwrap_options.NAMES))
            else:
                self.unwrap[option] = _boolean(value) if option in unwrap_options.BOOLEANS else value

    def _read_property(self, origin: str) -> None:
        name = properties.RENAMED.get(origin, origin)
        if name != origin:
            if name in self.connector:
                return self.report.note(origin, f"{name} stands beside it, and wins")
            self.report.note(origin, f"its name is {name} now")
        self.report.origins[f"source.{name}"] = origin
        property_ = properties.BY_NAME.get(name)
        if property_ is not None:
            self._take(origin, property_)
        elif name.startswith(properties.FILTER_OVERRIDE):
            self.source[name] = self.connector[origin]
        elif (family := next((each for each in properties.FAMILIES if name.startswith(each.prefix)), None)) is not None:
            self._take_option(origin, name.removeprefix(family.prefix))
        elif (reason := properties.describe_foreign(name)) is not None:
            self.report.note(origin, reason)
        elif name in unwrap_options.NAMES:
            self.report.refuse(origin, "it is an option of ExtractNewDocumentState", f"transforms.unwrap.{name}")
        else:
            known_names = [
                *properties.BY_NAME,
                *(foreign for foreign in properties.FOREIGN if "*" not in foreign),
                *properties.RENAMED,
            ]
            self.report.refuse(origin, "there is no such property", values.did_you_mean(name, known_names))

    def _take(self, origin: str, each: properties.Property) -> None:
        """Puts a property under `source`, unless its value is empty."""
        value = self._translated(origin, each)
        if value is None or (isinstance(value, str) and not value.strip()):
            return
        try:
            parsed_value = each.type.read(value)
        except values.InvalidValue:
            self.source[each.name] = value
            return
        self.source[each.name] = parsed_value if isinstance(parsed_value, (bool, int)) else value
        if each.name in REMARKS:
            self.report.note(origin, REMARKS[each.name])

    def _take_option(self, origin: str, option: str) -> None:
        """Puts an option of a Kafka client under `source`; options that only the Java client has are reported with the
        alternative.
        """
        login = dict(_LOGIN.findall(_text(self.connector, origin))) if option == "sasl.jaas.config" else {}
        if login.keys() == {"username", "password"}:
            self._take_login(origin.removesuffix("jaas.config"), login)
            self.report.note(origin, "it is sasl.username and sasl.password now")
        elif (reason := properties.of_javas_client(option)) is not None:
            self.report.note(origin, f"it is an option of Kafka's Java client: {reason}")
        elif properties.is_secret(option) and _ENV.fullmatch(_text(self.connector, origin)) is None:
            name = re.sub(r"[^A-Z0-9]+", "_", f"KAFKA_{option}".upper())
            self.source[origin] = self.report.variable(name, origin)
        else:
            self.source[origin] = self.connector[origin]

    def _take_login(self, start: str, login: Mapping[str, str]) -> None:
        """Puts a login under `source`, as options that begin with `start`; options of the connector itself win."""
        user = re.sub(r"\\(.)", r"\1", login["username"])
        if "${" in _ENV.sub("", user):
            user = self.report.variable("KAFKA_SASL_USERNAME", f"{start}username")
        password = self.report.variable("KAFKA_SASL_PASSWORD", f"{start}password")
        self.source |= {
            name: value
            for name, value in ((f"{start}username", user), (f"{start}password", password))
            if name not in self.connector
        }

    def _read_brokers(self) -> None:
        """Adds a variable for the brokers of Kafka Connect, which take the notifications and do not appear in a connector."""
        channels = [channel.strip() for channel in _text(self.connector, "notification.enabled.channels").split(",")]
        broker_properties = ("signal.kafka.bootstrap.servers", "producer.override.bootstrap.servers")
        if "sink" in channels and not any(name in self.connector for name in broker_properties):
            self.source[broker_properties[1]] = self.report.variable(
                "KAFKA_BOOTSTRAP_SERVERS", "the brokers of Kafka Connect, for the channel sink"
            )

    def _translated(self, origin: str, each: properties.Property) -> object:
        """The value in current terms; None if it only states the behaviour here."""
        value = self.connector[origin]
        if not isinstance(each.type, (values.Boolean, values.Integer)) and isinstance(value, (int, float)):
            value = values.written(value)
        if each.name == "max.queue.size.in.bytes" and str(value).strip() == "0":
            self.report.note(origin, "0 is no bound there; the queue always has one here")
            return None
        if each.name == "skipped.operations":
            return self._replaced(origin, value, "i", "c", "inserts are c now")
        if each.name in _CHANNELS:
            for channel, reason in _NO_CHANNELS.items():
                value = self._replaced(origin, value, channel, "", f"{reason}: {channel} is left out")
        return value

    def _replaced(self, origin: str, value: object, entry: str, by: str, why: str) -> object:
        entries = [item.strip() for item in value.split(",")] if isinstance(value, str) else []
        if entry not in entries:
            return value
        self.report.note(origin, why)
        return ",".join(filter(None, (by if item == entry else item for item in entries)))


def _text(connector: Mapping[str, object], name: str) -> str:
    value = connector.get(name)
    return "" if value is None else values.written(value).strip()


def _is_clean(uri: str) -> bool:
    """Whether a settings file may contain the connection string."""
    try:
        values.ConnectionString().read(uri)
    except values.InvalidValue:
        return False
    return True


def _split_reference(credentials: str) -> tuple[str, str, str]:
    """User, colon and password if the user is a reference, which contains colons itself."""
    end = credentials.find("}:")
    return (credentials, "", "") if end < 0 else (credentials[: end + 1], ":", credentials[end + 2 :])


def _boolean(value: object) -> object:
    text = str(value).strip().lower()
    return text == "true" if text in ("true", "false") else value


def _located(problem: errors.Problem, where: str) -> errors.Problem:
    return dataclasses.replace(problem, path=f"{where}: {problem.path}" if where else problem.path)


def remarks(notes: Iterable[PropertyNote]) -> list[str]:
    """One line per remark, in the order of the connector."""
    return [f"{note.name}: {note.why}" for note in notes]
