"""What this package says about saved settings: those that only a command sets."""

from spectrain.config.command_only import ALL, CommandOnlySetting, SavedSettings

SAVED = SavedSettings(
    command_only=(
        CommandOnlySetting(
            "follow", ALL, "starts a process", "listens, records requests, and starts commands"
        ),
        CommandOnlySetting("bench", ALL, "starts a process", "starts an engine"),
    ),
    renamed={
        # Servers and their states were in the core.
        "spectrain.features.server_source.": "spectrain_serve.training.server_source.",
        "spectrain.servers.": "spectrain_serve.servers.",
    },
)
