// Waits until it is told to end, and reaps whatever is left to it meanwhile: the first process of a pod, and of a node.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			os.Exit(0)
		}
		for {
			// Several children may stand behind one signal.
			reaped, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if reaped <= 0 || err != nil {
				break
			}
		}
	}
}
