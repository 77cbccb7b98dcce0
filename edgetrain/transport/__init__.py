"""How frames and messages travel: MQTT, or memory in one process."""
