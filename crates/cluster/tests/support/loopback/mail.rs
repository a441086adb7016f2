//! Bytes between the hosts of a cluster within one process.

use super::Hub;
use gpu_pool::{Error, Result};
use gpu_pool_cluster::extend::{HostTransport, Message};
use std::{collections::VecDeque, sync::Arc};

/// Mailboxes of bytes.
pub(super) struct Mail {
    pub hub: Arc<Hub>,
    pub host: usize,
}

impl HostTransport for Mail {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn exchange(&self, messages: Vec<Message>, lost: &dyn Fn() -> Option<Error>) -> Result<Vec<Message>> {
        self.hub.tap.get().into_iter().for_each(|tap| tap(self.host));
        for message in &messages {
            if let Message::Send { to, tag, bytes, range } = message {
                let bytes = bytes.as_slice()?[range.clone()].to_vec();
                self.hub.state.lock().mail.entry((self.host, *to, *tag)).or_default().push_back(bytes);
            }
        }
        self.hub.changed.notify_all();
        let receive = |message: Message| match message {
            Message::Receive { from, tag, mut into, len } => {
                let bytes = loop {
                    let mut state = self.hub.state.lock();
                    let next = state.mail.get_mut(&(from, self.host, tag)).and_then(VecDeque::pop_front);
                    if let Some(bytes) = next {
                        break bytes;
                    }
                    self.hub.wait(&mut state);
                    drop(state);
                    if let Some(error) = lost() {
                        return Err(error);
                    }
                };
                assert_eq!(bytes.len(), len, "{tag:?} from {from} to {}", self.host);
                into.as_mut_slice()?[..len].copy_from_slice(&bytes);
                Ok(Message::Receive { from, tag, into, len })
            }
            send => Ok(send),
        };
        messages.into_iter().map(receive).collect()
    }
}
