"""What this package says about saved settings: those that only a command sets."""

from spectrain.config.command_only import ALL, CommandOnlySetting, SavedSettings

SAVED = SavedSettings(
    command_only=(
        CommandOnlySetting("plan", ALL, "writes", "writes a file"),
        CommandOnlySetting("compare", ALL, "writes", "trains and writes other run folders"),
    )
)
