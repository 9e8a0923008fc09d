module lorafleet.dev/e2e/pause

go 1.26
