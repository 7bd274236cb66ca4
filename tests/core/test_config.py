"""Settings: defaults, file, environment; errors name the setting, the value and what is right."""

import pytest

from services.kit import config
from services.kit.config import ConfigError, Secret


def test_the_environment_beats_the_file_and_the_file_the_defaults(tmp_path):
    """Precedence is environment, file, default."""
    file = tmp_path / "lbledger.toml"
    file.write_text('[nats]\nurl = "nats://file:4222"\nreplicas = 3\n')

    settings = config.load({"LBLEDGER_NATS_URL": "nats://env:4222"}, str(file))

    assert ("nats://env:4222", 3) == (settings.nats.url, settings.nats.replicas)
    assert config.DatabaseSettings().pool_size == settings.database.pool_size


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"LBLEDGER_NATS_URLL": "x"}, ["LBLEDGER_NATS_URLL", "LBLEDGER_NATS_URL?"]),
        ({"LBLEDGER_HEALTH_PORT": "http"}, ["LBLEDGER_HEALTH_PORT", "'http'", "whole number"]),
        ({"LBLEDGER_APPLIER_ANNOUNCER": "bgp"}, ["applier.announcer", "'bgp'", "kube-vip"]),
        ({"LBLEDGER_NRP_EGRESS_ALLOWED": "a/b,c"}, ["nrp.egress_allowed", "'c'", "NAMESPACE"]),
        ({"LBLEDGER_NATS_URL": "http://n"}, ["nats.url", "nats://"]),
        ({"LBLEDGER_DATABASE_URL": "mysql://u:secret@h/d"}, ["database.url", "postgresql://"]),
        ({"LBLEDGER_PROJECTOR_BATCH": "0"}, ["projector.batch", "0", "greater"]),
        ({"LBLEDGER_APPLIER_BACKEND_ENTRIES": "1001"}, ["backend_entries", "1001", "0 to 1000"]),
        ({"LBLEDGER_CONFIG": "/nonexistent.toml"}, ["/nonexistent.toml"]),
        ({"LBLEDGER_ALLOCATOR_CLASSLESS": "perhaps"}, ["CLASSLESS", "perhaps", "true or false"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_named(env, words):
    """The message has the setting, the value and what would be right; never a secret."""
    with pytest.raises(ConfigError) as caught:
        config.load(env)

    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [("[nats]\nurll = 1", "urll"), ("nats = 1", "nats"), ("[", "TOML"), ("[nats]\nurl = 1", "url")],
)
def test_a_bad_file_is_named(tmp_path, text, word):
    """Unknown settings, wrong types and broken syntax of a file are told with the file's name."""
    file = tmp_path / "x.toml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=word):
        config.load({}, str(file))


def test_service_links_of_kubernetes_are_not_settings():
    """Variables that Kubernetes puts beside a Service called lbledger-nats are passed over."""
    env = {
        "LBLEDGER_HEALTH_SERVICE_HOST": "10.0.0.1",
        "LBLEDGER_X_PORT_4222_TCP_ADDR": "10.0.0.1",
        "LBLEDGER_X_PORT": "tcp://10.0.0.1:4222",
    }

    assert config.Settings() == config.load(env)


def test_secrets_are_masked_wherever_settings_are_shown():
    """Neither repr, str, format nor `lbledger config` gives a secret away; reveal() does."""
    env = {
        "LBLEDGER_DATABASE_URL": "postgresql://u:hunter2@h/d",
        "LBLEDGER_NATS_PASSWORD": "hunter2",
        "LBLEDGER_NATS_URL": "nats://u:hunter2@h:4222",
        "LBLEDGER_NRP_TOKEN": "hunter2",
    }
    settings = config.load(env)

    shown = [repr(settings.database), f"{settings.nats.password}", str(settings.nrp.token)]

    assert not any("hunter2" in text for text in shown)
    assert "hunter2" not in str(config.show(settings))
    assert settings.nats.password.reveal() == "hunter2"
    assert isinstance(settings.database.url, Secret)


def test_lists_and_maps_can_be_written_in_the_environment():
    """Comma-separated or JSON."""
    plain = config.load({"LBLEDGER_WATCHER_NAMESPACES": "a, b"})
    json = config.load({"LBLEDGER_WATCHER_NAMESPACES": '["a","b"]'})
    selectors = config.load({"LBLEDGER_WATCHER_SELECTORS": "services=app=x"})

    assert ("a", "b") == plain.watcher.namespaces == json.watcher.namespaces
    assert {"services": "app=x"} == selectors.watcher.selectors
