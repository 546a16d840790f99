"""The DHT of a swarm: member cards by key, and the lookups that find them."""
