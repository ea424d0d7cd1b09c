//! Name service for the actor: its resolv.conf names the worker's end of the link, and questions go to the node.
//!
//! Whoever may connect to port 53 of anything may ask for names; who may not is refused at once, rather than left to
//! wait, and cannot tell the world anything through questions either.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ate_orders::EgressRule;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UdpSocket, UnixStream};

use crate::serve::Worker;

/// What the node is asked instead of an address: a stream of questions, framed as DNS over TCP is.
pub const QUESTIONS: &str = "names";

/// Longest question that is taken; a resolver sends 512 bytes, or up to this with extensions.
const MAX_QUESTION: usize = 4096;

/// Longest answer over UDP without extensions; a longer one is cut, and asked for again over TCP.
const MAX_PLAIN_ANSWER: usize = 512;

/// Resolvers give up after five seconds and ask again.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Questions under way; more are dropped, and asked again.
const MAX_QUESTIONS: usize = 64;

/// The fixed part of every message.
const HEADER: usize = 12;

pub(crate) async fn serve(worker: Arc<Worker>, socket: UdpSocket) {
    let (socket, places) = (Arc::new(socket), Arc::new(tokio::sync::Semaphore::new(MAX_QUESTIONS)));
    let mut buffer = vec![0; MAX_QUESTION];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else { continue };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let (question, worker, socket) = (buffer[..length].to_vec(), Arc::clone(&worker), Arc::clone(&socket));
        if question.len() < HEADER {
            continue;
        }
        tokio::spawn(async move {
            let allowed = !worker.is_lease_over() && worker.occupant().is_some_and(|tenant| may_ask(&tenant.egress));
            let answer = match allowed {
                true => tokio::time::timeout(ANSWER_WITHIN, ask(&question)).await.ok().and_then(Result::ok),
                false => Some(refusal(&question)),
            };
            if let Some(answer) = answer {
                let _ = socket.send_to(&fitted(answer, &question), from).await;
            }
            drop(place);
        });
    }
}

/// Whether the address is that of the name service.
pub(crate) fn is_service(address: IpAddr) -> bool {
    [IpAddr::V4(ate_network::GATEWAY_V4), IpAddr::V6(ate_network::GATEWAY_V6)].contains(&address.to_canonical())
}

pub fn may_ask(rules: &[EgressRule]) -> bool {
    rules.iter().any(|rule| rule.ports.is_empty() || rule.ports.contains(&53))
}

async fn ask(question: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut node = UnixStream::connect(std::path::Path::new(crate::root::LINK).join(crate::EGRESS_SOCKET)).await?;
    node.write_all(format!("{QUESTIONS}\n").as_bytes()).await?;
    if node.read_u8().await? != 1 {
        return Ok(refusal(question));
    }
    let length = u16::try_from(question.len()).map_err(std::io::Error::other)?;
    node.write_u16(length).await?;
    node.write_all(question).await?;
    let mut answer = vec![0; usize::from(node.read_u16().await?)];
    node.read_exact(&mut answer).await?;
    Ok(answer)
}

/// The question, as an answer that says no.
fn refusal(question: &[u8]) -> Vec<u8> {
    let mut answer = question.to_vec();
    answer[2] |= 0x80;
    answer[3] = (answer[3] & 0xf0) | 5;
    answer
}

/// Cut to what fits the one who asked: a header that says so, and the question.
fn fitted(mut answer: Vec<u8>, question: &[u8]) -> Vec<u8> {
    // Extensions are announced by an additional record; who has none takes 512 bytes.
    let extended = question[10..HEADER] != [0, 0];
    let limit = if extended { MAX_QUESTION } else { MAX_PLAIN_ANSWER };
    if answer.len() > limit {
        answer.truncate(HEADER);
        answer[2] |= 0x02;
        answer[4..HEADER].fill(0);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> Vec<u8> {
        [&[0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0][..], b"\x04name\x00\x00\x01\x00\x01"].concat()
    }

    #[test]
    fn a_refusal_answers_the_very_question() {
        let answer = refusal(&question());
        assert_eq!(answer[..4], [0xab, 0xcd, 0x81, 5]);
        assert_eq!(answer[4..], question()[4..]);
    }

    #[test]
    fn an_answer_that_does_not_fit_says_so() {
        let long = [&question()[..], &[0; 600]].concat();
        let cut = fitted(long.clone(), &question());
        assert_eq!((cut.len(), cut[2] & 2), (HEADER, 2));
        let mut extended = question();
        extended[11] = 1;
        assert_eq!(fitted(long.clone(), &extended), long);
    }

    #[test]
    fn names_are_for_those_who_may_reach_port_53() {
        let rule = |ports: &[u16]| EgressRule { network: [10, 0, 0, 0].into(), prefix: 8, ports: ports.to_vec() };
        assert!(may_ask(&[rule(&[443]), rule(&[53])]) && may_ask(&[rule(&[])]));
        assert!(!may_ask(&[]) && !may_ask(&[rule(&[443])]));
    }
}
