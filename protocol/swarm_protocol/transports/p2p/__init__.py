"""The real network: hivemind's p2pd for the DHT and streams, the gossip process for topics."""
