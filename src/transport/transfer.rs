//! A message in progress, as held by its caller.

use super::item::Item;
use super::table::Table;
use std::sync::Arc;
use std::time::Duration;

/// A message in progress. Its memory is in use until it is over or dropped.
#[derive(Debug)]
pub struct Transfer {
    number: u64,
    item: Arc<Item>,
    table: Arc<Table>,
}

impl Transfer {
    pub(super) fn new(number: u64, item: Arc<Item>, table: Arc<Table>) -> Self {
        Self { number, item, table }
    }

    /// Waits until it is over: returns the number of bytes sent or received, or the reason of the failure. None if that
    /// takes longer than the limit.
    pub fn wait(&self, limit: Duration) -> Option<Result<usize, String>> {
        self.item.wait(limit)
    }

    /// Time in which its bytes were moving, without the wait for the other side to begin; none if they still are, or if
    /// it failed. Of a received message: from the arrival of its header to that of its last byte.
    pub fn took(&self) -> Option<Duration> {
        self.item.took()
    }
}

impl Drop for Transfer {
    /// Releases the memory. A message in transit cannot be cancelled alone: the connections end with it.
    fn drop(&mut self) {
        self.item.fail("the transfer was dropped");
        if self.item.is_moving() {
            self.table.end("a message was cancelled in transit");
            self.item.wait_still();
        }
        self.table.forget(self.number);
    }
}
