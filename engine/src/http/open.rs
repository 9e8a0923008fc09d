//! The requests that have been let in: what a drain waits for.

use std::sync::Arc;

use tokio::sync::watch;

use crate::refusal::Refusal;

/// Counts the requests that are answered, and lets nobody in once it is closed.
#[derive(Debug, Default)]
pub struct OpenRequests {
    state: Arc<watch::Sender<State>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    closed: bool,
    open: usize,
}

/// One request from its first look on until its answer has been handed on whole, or nobody wants it any more; dropping
/// it says so.
#[derive(Debug)]
pub struct OpenRequest {
    state: Arc<watch::Sender<State>>,
}

impl OpenRequests {
    /// Who is let in is counted in the same moment: no request slips in behind a drain that has seen none.
    ///
    /// # Errors
    /// 503 once it is closed.
    pub fn enter(&self) -> Result<OpenRequest, Refusal> {
        let entered = self.state.send_if_modified(|state| {
            state.open += usize::from(!state.closed);
            !state.closed
        });
        if entered { Ok(OpenRequest { state: self.state.clone() }) } else { Err(Refusal::draining()) }
    }

    pub fn close(&self) {
        self.state.send_modify(|state| state.closed = true);
    }

    pub fn is_closed(&self) -> bool {
        self.state.borrow().closed
    }

    pub fn count(&self) -> usize {
        self.state.borrow().open
    }

    /// Waits until none is open.
    pub async fn ended(&self) {
        // The sender lives as long as `self`.
        let _ = self.state.subscribe().wait_for(|state| state.open == 0).await;
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.state.send_modify(|state| state.open = state.open.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn who_was_let_in_is_waited_for_and_nobody_comes_behind() {
        let requests = OpenRequests::default();
        assert!(requests.ended().now_or_never().is_some());
        let (first, second) = (requests.enter().unwrap(), requests.enter().unwrap());
        assert!(!requests.is_closed());
        requests.close();
        assert!(requests.is_closed());
        assert_eq!(requests.enter().unwrap_err(), Refusal::draining());
        for (request, left) in [(first, 1), (second, 0)] {
            assert!(requests.ended().now_or_never().is_none());
            drop(request);
            assert_eq!(requests.count(), left);
        }
        assert!(requests.ended().now_or_never().is_some());
    }
}
