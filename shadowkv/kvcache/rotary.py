from shadowkv.ops.rotate.tables import RopeConfig, RotaryTables as Rotary  # noqa
